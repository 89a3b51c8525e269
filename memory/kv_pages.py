"""Paged KV: pages of a pool, a block table per sequence, exact accounting. The layout is fixed in docs/design.md."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["KVFullError", "PagePool", "PageTable"]


class KVFullError(Exception):
    """Raised when a sequence needs more pages than the pool has left.

    Attributes:
        asked: Pages asked for.
        free: Pages that were free.
        total: Pages of the pool.
    """

    def __init__(self, asked: int, free: int, total: int, page_size: int) -> None:
        super().__init__(
            f"Cannot give {asked} KV pages of {page_size} tokens: {free} of {total} pages are free. "
            f"A larger max_model_len makes the pool larger."
        )
        self.asked, self.free, self.total = asked, free, total


@dataclass(slots=True)
class PageTable:
    """The pages of one sequence, in the order of its positions. Position p is in page `pages[p // page_size]`."""

    pages: list[int] = field(default_factory=list)
    is_contiguous: bool = True


class PagePool:
    """Pages for keys and values of every attention layer of one model.

    Per layer: keys [num_pages × page_size, num_kv_heads, key_dim] and values [num_pages × page_size, num_kv_heads,
    value_dim], allocated at the layer's first write, when its shapes are known; a page is `page_size` consecutive rows.
    Page ids are the same in every layer.

    Args:
        num_pages: Pages in the pool.
        page_size: Tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num_free(self) -> int:
        """Pages that belong to no sequence."""
        return len(self._free)

    def reserve(self, table: PageTable, num_tokens: int) -> None:
        """Grow a table to hold `num_tokens` positions. Nothing is copied.

        Raises:
            KVFullError: When the pool has too few free pages; the table is unchanged.
        """
        missing = -(-num_tokens // self.page_size) - len(table.pages)
        if missing > len(self._free):
            raise KVFullError(missing, len(self._free), self.num_pages, self.page_size)
        for _ in range(missing):
            page = self._free.pop()
            table.is_contiguous &= not table.pages or page == table.pages[-1] + 1
            table.pages.append(page)

    def release(self, table: PageTable) -> None:
        """Return all pages of a table to the pool. Idempotent."""
        self._free.extend(reversed(table.pages))
        self._free.sort(reverse=True)  # consecutive pages for the next sequence: it then reads without gathering
        table.pages, table.is_contiguous = [], True

    def write(self, layer: int, table: PageTable, position: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store consecutive positions of one sequence.

        Args:
            layer: Attention layer number.
            table: Must reach to the last position written.
            position: The first position.
            keys: [num_tokens, num_kv_heads, key_dim].
            values: [num_tokens, num_kv_heads, value_dim].
        """
        if layer not in self._layers:
            rows = self.num_pages * self.page_size
            self._layers[layer] = (keys.new_empty((rows, *keys.shape[1:])), values.new_empty((rows, *values.shape[1:])))
        stored_keys, stored_values = self._layers[layer]
        rows_of = self._rows(table, position, position + keys.shape[0], keys.device)
        stored_keys[rows_of] = keys
        stored_values[rows_of] = values

    def read(self, layer: int, table: PageTable, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of positions `start` … `end` − 1: [end − start, num_kv_heads, dim] each.

        A view where the sequence's pages are consecutive, else a gathered copy.
        """
        keys, values = self._layers[layer]
        rows_of = self._rows(table, start, end, keys.device)
        return keys[rows_of], values[rows_of]

    def _rows(self, table: PageTable, start: int, end: int, device: torch.device) -> slice | torch.Tensor:
        size = self.page_size
        if not 0 <= start <= end <= len(table.pages) * size:
            raise IndexError(f"positions {start} to {end} are not within the {len(table.pages)} pages of the sequence")
        if start == end:
            return slice(0, 0)
        if table.is_contiguous or start // size == (end - 1) // size:
            first = table.pages[start // size] * size + start % size
            return slice(first, first + end - start)
        positions = torch.arange(start, end, device=device)
        pages = torch.tensor(table.pages, device=device)
        return pages[positions // size] * size + positions % size

    def __repr__(self) -> str:
        return f"<PagePool {self.num_pages} pages of {self.page_size} tokens: {self.num_free} free>"
