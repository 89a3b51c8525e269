"""What the entries of a run mean, as docs/statistics.md says it."""

from __future__ import annotations

from typing import NamedTuple

from .runs import Run

__all__ = ["Shape", "shape_of"]


class Shape(NamedTuple):
    """A row of the table of shapes: a stable name, and its meaning in words."""

    name: str
    words: str


def shape_of(run: Run, *, is_cut_off: bool = False) -> Shape:
    """Returns the shape of a run.

    Args:
        run: All that its logs hold.
        is_cut_off: Whether its log ends in a line that was not written to its end.
    """
    shape = _shape(run)
    if run.final is None and is_cut_off:
        return Shape(shape.name, f"{shape.words}; its log ends in a cut line")
    if any(True for _ in run.numbers.missing()):
        return Shape(shape.name, f"{shape.words}; entries are missing, so that it may be another")
    return shape


def _shape(run: Run) -> Shape:
    is_built = any(store.built is not None for store in run.stores.values())
    final = run.final
    if run.requested is None:
        if is_built or final is not None:
            return Shape("inconsistent", "streaming ran, and nothing says that it was requested")
        return Shape("not_requested", "streaming was not requested")
    if final is None:
        when = "after a store was built" if is_built else "before a store was built"
        return Shape("no_exit_built" if is_built else "no_exit", f"the exit was not run, or not yet, {when}")
    if not is_built and not final.serials and not final.num_folded:
        early = "" if final.flushed_by is None else f"; flushed early by {final.flushed_by}"
        return Shape("never_built", f"requested and never built: {final.reason or 'no reason is given'}{early}")
    if final.flushed_by is not None:
        return Shape("flushed", f"flushed early by {final.flushed_by}; later totals are in store.closed")
    if final.totals is not None and final.totals[0] == 0:
        return Shape("ran", "it ran to its exit without a step: every figure is void")
    return Shape("ran", "it ran to its exit")
