"""Which numbers of a sequence 1, 2, 3, … were seen, in constant memory where they come about in order."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Numbers"]

_PAGE = 1024
# About 10 MB of pages; a log with numbers strewn wider is followed no further.
_MAX_PAGES = 65536


class Numbers:
    """A set of positive integers: everything up to a mark, and above it pages of bits, of which a full one is dropped.

    Attributes:
        mark: Every number up to this one is in the set.
        last: The largest number in the set, 0 where it is empty.
        is_followed: False once numbers were strewn too widely to be kept; nothing is missing or double from then on.
    """

    __slots__ = ("_pages", "is_followed", "last", "mark")

    def __init__(self) -> None:
        self.mark = 0
        self.last = 0
        self.is_followed = True
        self._pages: dict[int, int] = {}

    def add(self, number: int) -> bool:
        """Adds a number; returns whether it is new."""
        if number == self.mark + 1 and not self._pages:
            self.mark = self.last = number
            return True
        if number in self:
            return False
        page, bit = divmod(number, _PAGE)
        if page not in self._pages and len(self._pages) >= _MAX_PAGES:
            self.is_followed = False
        if self.is_followed:
            self.last = max(self.last, number)
            self._pages[page] = self._pages.get(page, 0) | 1 << bit
            self._advance()
        return True

    def missing(self) -> Iterator[tuple[int, int]]:
        """Yields the ranges of numbers below the largest that are not there, as `(first, last)`."""
        if not self.is_followed:
            return
        expected = self.mark + 1
        for page in sorted(self._pages):
            bits = self._pages[page]
            for bit in range(_PAGE):
                number = page * _PAGE + bit
                if bits >> bit & 1 and number >= expected:
                    if number > expected:
                        yield expected, number - 1
                    expected = number + 1

    def _advance(self) -> None:
        while self.mark + 1 in self:
            self.mark += 1
            if self.mark % _PAGE == _PAGE - 1:
                self._pages.pop(self.mark // _PAGE, None)
        if self.mark == self.last:
            self._pages.clear()

    def __contains__(self, number: int) -> bool:
        if number <= self.mark:
            return True
        page, bit = divmod(number, _PAGE)
        return bool(self._pages.get(page, 0) >> bit & 1)

    def __repr__(self) -> str:
        return f"<Numbers to {self.mark}, last {self.last}, {len(self._pages)} pages>"
