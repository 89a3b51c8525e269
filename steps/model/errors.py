"""What can be wrong with a model that its files are not to blame for."""

from __future__ import annotations

from ...memory.errors import CheckpointError

__all__ = ["NotMixtureOfExpertsError", "UnsupportedModelError"]


class UnsupportedModelError(CheckpointError):
    """Raised when a model is of a kind that this version does not run; the message names what is missing."""


class NotMixtureOfExpertsError(UnsupportedModelError):
    """Raised when a model has no routed experts: there is nothing to stream."""
