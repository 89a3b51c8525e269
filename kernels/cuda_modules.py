"""Device code: compiled once per process for the device that is there, launched with one structure as its argument.

This is the border to CuPy: it is imported here and nowhere else.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["Kernel", "WordList", "cuda_error", "load_cupy", "load_kernel", "load_kernels", "spin", "write_words"]

MAX_WORDS = 960
"""32-bit words of one `write_words` launch; the arguments of a kernel may take 4 KiB. As in control.cu."""


@functools.cache
def load_cupy() -> Any:
    """Import CuPy and see that it finds a device.

    Raises:
        RuntimeError: When CuPy is missing, cannot be imported or finds no usable device; names the extra to install.
    """
    extra = "cuda12" if (torch.version.cuda or "13").startswith("12") else "cuda13"
    try:
        import cupy
    except Exception as exc:  # a broken installation raises anything
        raise RuntimeError(
            f"The GPU path needs CuPy, which cannot be imported ({exc}): install expertstream[{extra}]."
        ) from exc
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as exc:
        raise RuntimeError(f"CuPy finds no usable GPU ({exc}); expertstream[{extra}] must match the driver.") from exc
    if not count:
        raise RuntimeError("CuPy finds no GPU.")
    return cupy


def cuda_error() -> type[Exception]:
    """Return what CuPy raises when a CUDA runtime call fails; it has cleared the thread's latched error by then."""
    error: type[Exception] = load_cupy().cuda.runtime.CUDARuntimeError
    return error


class Kernel:
    """One entry function, bound to a device. Its argument is a `ctypes.Structure`, copied by the launch.

    Args:
        raw: CuPy's kernel; kept, so that its module stays loaded.
        device_index: The device that it was compiled for.
    """

    __slots__ = ("_device_index", "_driver", "_function", "_raw", "_runtime")

    def __init__(self, raw: Any, device_index: int) -> None:
        cupy = load_cupy()
        self._driver, self._runtime = cupy.cuda.driver, cupy.cuda.runtime
        self._raw, self._device_index = raw, device_index
        self._function: int = raw.kernel.ptr

    def launch(self, grid: tuple[int, int], num_threads: int, argument: ctypes.Structure, stream: int) -> None:
        """Launch on a stream.

        Args:
            grid: Blocks in x and y.
            num_threads: Threads of a block.
            argument: The kernel's one argument; may be changed as soon as this returns.
            stream: Handle of the stream; `torch.cuda.current_stream().cuda_stream` is torch's current one.
        """
        self._runtime.setDevice(self._device_index)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        self._driver.launchKernel(
            self._function, grid[0], grid[1], 1, num_threads, 1, 1, 0, stream, ctypes.addressof(arguments), 0
        )

    def __repr__(self) -> str:
        return f"<Kernel {self._raw.name} on cuda:{self._device_index}>"


def load_kernels(file: str, names: Sequence[str], defines: Mapping[str, int], device_index: int) -> dict[str, Kernel]:
    """Return entry functions of a source file beside this one, compiling it when this process has not yet.

    Args:
        file: `expert_rows.cu` or `control.cu`.
        names: Entry functions.
        defines: Macros and their values.
        device_index: The device to compile for. CuPy keeps binaries on disk, so later processes compile nothing.
    """
    module = _load_module(file, tuple(sorted(defines.items())), device_index)
    cupy = load_cupy()
    with cupy.cuda.Device(device_index):
        return {name: Kernel(module.get_function(name), device_index) for name in names}


@functools.cache
def _load_module(file: str, defines: tuple[tuple[str, int], ...], device_index: int) -> Any:
    cupy = load_cupy()
    source = Path(__file__).with_name(file).read_text(encoding="utf-8")
    with cupy.cuda.Device(device_index):
        return cupy.RawModule(code=source, options=("-std=c++17", *(f"-D{name}={value}" for name, value in defines)))


@functools.cache
def load_kernel(name: str, device_index: int) -> Kernel:
    """Return an entry function of control.cu."""
    return load_kernels("control.cu", [name], {}, device_index)[name]


class WordList(ctypes.Structure):
    """`WordList` of control.cu."""

    _fields_ = (("out", ctypes.c_void_p), ("count", ctypes.c_int), ("words", ctypes.c_int * MAX_WORDS))


class _Delay(ctypes.Structure):
    _fields_ = (("ns", ctypes.c_ulonglong),)


def write_words(out: torch.Tensor, words: Sequence[int]) -> None:
    """Store 32-bit words in device memory without the copy engine, where they would wait behind records.

    Args:
        out: int32 [words], device, contiguous.
        words: The values; the caller may change them as soon as this returns.

    Stream:
        Enqueued on torch's current stream.
    """
    index = out.device.index
    kernel = load_kernel("write_words", index)
    stream = torch.cuda.current_stream(out.device).cuda_stream
    for start in range(0, len(words), MAX_WORDS):
        part = words[start : start + MAX_WORDS]
        argument = WordList(out.data_ptr() + 4 * start, len(part))
        argument.words[: len(part)] = part
        kernel.launch((1, 1), 256, argument, stream)


def spin(ns: int, device_index: int, stream: int) -> None:
    """Keep a stream busy for `ns` nanoseconds of device time."""
    load_kernel("spin", device_index).launch((1, 1), 1, _Delay(ns), stream)
