"""KV pages: exact accounting, and the same keys and values whichever pages a sequence has."""

from __future__ import annotations

from random import Random

import pytest
import torch

from expertstream.memory.kv_pages import KVFullError, PagePool, PageTable


def _rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 3, generator=generator), torch.randn(count, 2, 5, generator=generator)


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (40, 10)])
def test_reserve_takes_exactly_the_pages_that_the_tokens_need(num_tokens: int, pages: int) -> None:
    """A sequence has as many pages as its positions fill, the last one in part."""
    pool, table = PagePool(10, 4), PageTable()
    pool.reserve(table, num_tokens)
    assert len(table.pages) == pages
    assert pool.num_free == 10 - pages
    assert repr(pool) == f"<PagePool 10 pages of 4 tokens: {10 - pages} free>"


def test_reserve_of_what_is_already_there_takes_nothing() -> None:
    """Growing to a length that fits, or to a smaller one, changes nothing."""
    pool, table = PagePool(10, 4), PageTable()
    pool.reserve(table, 9)
    pages = list(table.pages)
    for num_tokens in (9, 12, 3, 0):
        pool.reserve(table, num_tokens)
    assert table.pages == pages


def test_reserve_beyond_the_pool_raises_and_changes_nothing() -> None:
    """A full pool says asked, free and total; the sequence keeps what it had and a smaller wish is granted."""
    pool, table = PagePool(4, 4), PageTable()
    pool.reserve(table, 8)
    pages = list(table.pages)
    with pytest.raises(KVFullError, match="Cannot give 3 KV pages of 4 tokens: 2 of 4 pages are free") as caught:
        pool.reserve(table, 17)
    assert (caught.value.asked, caught.value.free, caught.value.total) == (3, 2, 4)
    assert (table.pages, pool.num_free) == (pages, 2)
    pool.reserve(table, 16)
    assert pool.num_free == 0


def test_release_returns_every_page_once() -> None:
    """Releasing twice is releasing once."""
    pool, table = PagePool(4, 4), PageTable()
    pool.reserve(table, 16)
    pool.release(table)
    pool.release(table)
    assert (pool.num_free, table.pages) == (4, [])
    pool.reserve(table, 16)
    assert sorted(table.pages) == [0, 1, 2, 3]


def test_pages_of_random_sequences_are_never_shared_and_all_come_back() -> None:
    """In any order of growing and releasing: pages in use plus free pages are the pool, each page once."""
    random, pool = Random(0), PagePool(16, 4)
    tables, shortages = [PageTable() for _ in range(5)], list[int]()
    for _ in range(500):
        table = random.choice(tables)
        if random.random() < 0.3:
            pool.release(table)
        else:
            try:
                pool.reserve(table, random.randrange(1, 40))
            except KVFullError as exc:
                shortages.append(exc.asked - exc.free)
        used = [page for each in tables for page in each.pages]
        assert len(set(used)) == len(used)
        assert len(used) + pool.num_free == 16
        for each in tables:
            steps = [b - a for a, b in zip(each.pages, each.pages[1:])]
            assert each.is_contiguous == all(step == 1 for step in steps)
    assert min(shortages) > 0
    for table in tables:
        pool.release(table)
    assert pool.num_free == 16


def test_sequence_in_an_empty_pool_reads_without_gathering() -> None:
    """Consecutive pages are read as a view of the pool's memory."""
    pool, table = PagePool(8, 4), PageTable()
    pool.reserve(table, 10)
    pool.write(0, table, 0, *_rows(10, 0))
    assert table.is_contiguous
    first, again = pool.read(0, table, 2, 9), pool.read(0, table, 2, 9)
    assert [a.data_ptr() for a in first] == [b.data_ptr() for b in again]


def test_scattered_pages_read_as_consecutive_ones_do() -> None:
    """Where a sequence's pages lie changes nothing in what is read, for any range and however it was written."""
    pool, plain, other, scattered = PagePool(16, 4), PageTable(), PageTable(), PageTable()
    for length in range(4, 25, 4):
        pool.reserve(scattered, length)
        pool.reserve(other, length // 2)
    pool.reserve(plain, 24)
    assert not scattered.is_contiguous
    for layer in (0, 3):
        keys, values = _rows(24, layer)
        pool.write(layer, plain, 0, keys, values)
        for start, end in ((0, 7), (7, 8), (8, 23), (23, 24)):
            pool.write(layer, scattered, start, keys[start:end], values[start:end])
    for layer in (0, 3):
        keys, values = _rows(24, layer)
        for start in range(24):
            for end in range(start, 25):
                for table in (plain, scattered):
                    read = pool.read(layer, table, start, end)
                    assert torch.equal(read[0], keys[start:end])
                    assert torch.equal(read[1], values[start:end])


@pytest.mark.parametrize(("start", "end"), [(0, 9), (8, 9), (-1, 2), (3, 2)])
def test_positions_beyond_the_sequences_pages_are_refused(start: int, end: int) -> None:
    """A position without a page of its own never reads or overwrites another sequence's."""
    pool, table, other = PagePool(8, 4), PageTable(), PageTable()
    pool.reserve(table, 8)
    pool.reserve(other, 8)
    keys, values = _rows(8, 0)
    pool.write(0, table, 0, keys, values)
    pool.write(0, other, 0, keys, values)
    with pytest.raises(IndexError, match="not within the 2 pages"):
        pool.read(0, table, start, end)
    if start >= 0 and end > start:
        with pytest.raises(IndexError):
            pool.write(0, table, start, keys.new_zeros(end - start, 2, 3), values.new_zeros(end - start, 2, 5))
    assert torch.equal(pool.read(0, other, 0, 8)[0], keys)
