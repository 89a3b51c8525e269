"""The device code compiles for every architecture and with every combination of macros that production uses."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from expertstream.kernels.experts import ExpertShape
from expertstream.kernels.gates import (
    CLAMPED_SWIGLU,
    CONCATENATED,
    GELU_TANH,
    INTERLEAVED,
    NONE,
    RELU_SQUARED,
    SILU,
    UNFUSED,
    FusedGate,
)
from expertstream.kernels.slot_experts import defines

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc")

KERNELS = Path(defines.__code__.co_filename).parent
ARCHITECTURES = ("sm_80", "sm_90", "sm_120")
MAIN = (torch.bfloat16, FusedGate(CONCATENATED, SILU), False)
VARIANTS = [
    MAIN,
    (torch.float16, FusedGate(CONCATENATED, SILU), False),
    (torch.float32, FusedGate(CONCATENATED, SILU), False),
    (torch.bfloat16, FusedGate(CONCATENATED, GELU_TANH), False),
    (torch.bfloat16, FusedGate(CONCATENATED, CLAMPED_SWIGLU), False),
    (torch.bfloat16, FusedGate(NONE, RELU_SQUARED), False),
    (torch.bfloat16, UNFUSED, False),
    (torch.bfloat16, FusedGate(INTERLEAVED, CLAMPED_SWIGLU), True),
    (torch.float32, FusedGate(CONCATENATED, SILU), True),
    (torch.float16, UNFUSED, True),
]


def compile_file(name: str, out: Path, *options: str) -> str:
    """Compiles for every architecture at once, any warning being an error; returns what the assembler reports."""
    assert NVCC is not None
    targets = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in ARCHITECTURES]
    command = [NVCC, "-std=c++17", "-fatbin", *targets, "-Werror=all-warnings", "-Xptxas=-v", *options]
    done = subprocess.run([*command, "-o", str(out), str(KERNELS / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("variant", VARIANTS)
def test_expert_rows_compile_and_agree_with_the_host_on_the_argument(
    variant: tuple[torch.dtype, FusedGate, bool], tmp_path: Path
) -> None:
    """Each variant compiles, its argument has the size that the host sends, and the main one keeps to registers."""
    dtype, gate, is_transposed = variant
    macros = defines(dtype, gate, ExpertShape("gate_up_proj", is_transposed, False, gate))
    report = compile_file("expert_rows.cu", tmp_path / "out.fatbin", *(f"-D{n}={v}" for n, v in macros.items()))
    assert set(re.findall(r"for '(sm_\d+)'", report)) == set(ARCHITECTURES)
    if variant == MAIN:
        assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
        assert set(re.findall(r"(\d+) bytes stack", report)) == {"0"}


def test_argument_of_another_size_is_refused(tmp_path: Path) -> None:
    """The check of the argument's size is one: it fails when host and device differ."""
    with pytest.raises(AssertionError, match="the host's Task differs"):
        compile_file("expert_rows.cu", tmp_path / "out.fatbin", "-DTASK_BYTES=8")


def test_control_compiles(tmp_path: Path) -> None:
    """Control words and the delay compile everywhere."""
    compile_file("control.cu", tmp_path / "out.fatbin")
