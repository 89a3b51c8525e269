"""What is wrong in a log and where: violations, and ranges of damaged lines; both bounded, and counted beyond that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Findings", "LogRead", "Place", "Violation"]

# Beyond these the rest is counted and not kept: a log that is wrong in every line must not fill the memory.
MAX_VIOLATIONS = 1000
MAX_RANGES = 1000


class Place(NamedTuple):
    """A line of a log, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Violation(NamedTuple):
    """A promise that a log breaks.

    Attributes:
        place: The line that shows it.
        run_id: The run, "" where the line names none.
        rule: A stable name, as `sequence.gap`.
        text: What is wrong, with the figures.
    """

    place: Place
    run_id: str
    rule: str
    text: str

    def as_dict(self) -> dict[str, str | int]:
        """Returns it as JSON values."""
        return {
            "file": self.place.file,
            "line": self.place.line,
            "run_id": self.run_id,
            "rule": self.rule,
            "text": self.text,
        }


class Findings:
    """Collects violations: the first 1000, and how many there are."""

    def __init__(self) -> None:
        self.kept: list[Violation] = []
        self.num_found = 0

    def add(self, place: Place, run_id: str, rule: str, text: str) -> None:
        """Adds one violation."""
        self.num_found += 1
        if len(self.kept) < MAX_VIOLATIONS:
            self.kept.append(Violation(place, run_id, rule, text))

    def __repr__(self) -> str:
        return f"<Findings {self.num_found} found, {len(self.kept)} kept>"


@dataclass(slots=True)
class LogRead:
    """What reading one log came to.

    Attributes:
        name: As it was given.
        num_lines: Lines of any kind.
        num_entries: Entries of this library.
        num_others: JSON objects of somebody else, which a host application's log holds too.
        num_damaged: Lines that are no JSON object.
        damaged: Ranges of such lines, `(first, last, reason)`; the first 1000.
        cut: The line number and the text of a last line that was not written to its end; None where there is none.
    """

    name: str
    num_lines: int = 0
    num_entries: int = 0
    num_others: int = 0
    num_damaged: int = 0
    damaged: list[tuple[int, int, str]] = field(default_factory=list)
    cut: tuple[int, str] | None = None

    def add_damage(self, line: int, reason: str) -> None:
        """Counts a damaged line, in one range with its neighbour where both have one reason."""
        self.num_damaged += 1
        if self.damaged and self.damaged[-1][1:] == (line - 1, reason):
            self.damaged[-1] = (self.damaged[-1][0], line, reason)
        elif len(self.damaged) < MAX_RANGES:
            self.damaged.append((line, line, reason))
