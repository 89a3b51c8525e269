"""Errors about a checkpoint: fields, and messages made of them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from checkpoints import tensor

from expertstream.memory.errors import CheckpointError, MissingShardError, ReadError, TruncatedShardError

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3_5-moe"
TWO = {"a": tensor("F32", 2, 3, seed=1), "b": tensor("BF16", 4, seed=2)}


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("m", "it is odd", "t"),
        MissingShardError("m", {"a.safetensors": 2}),
        TruncatedShardError("m", 9, 8, "t"),
        ReadError("m", 1, 2, 0, "the file ended"),
    ],
)
def test_errors_copied_and_pickled_keep_message_and_fields(error: CheckpointError) -> None:
    """An error crosses a process boundary whole."""
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
