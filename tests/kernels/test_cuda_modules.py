"""The border to CuPy: what is said when it is not there, and words that reach the device."""

from __future__ import annotations

import sys

import pytest
import torch

from expertstream.kernels.cuda_modules import MAX_WORDS, load_cupy, write_words


@pytest.mark.parametrize("error", [ImportError("libnvrtc.so.13"), RuntimeError("broken")])
def test_cupy_that_cannot_be_imported_names_the_extra(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing or broken CuPy is one clear error that says what to install, with the cause."""

    class Finder:
        def find_spec(self, name: str, *args: object) -> None:
            if name == "cupy":
                raise error

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    load_cupy.cache_clear()
    with pytest.raises(RuntimeError, match=r"needs CuPy.*install expertstream\[cuda1[23]\]") as caught:
        load_cupy()
    assert caught.value.__cause__ is error
    load_cupy.cache_clear()


@pytest.mark.gpu
def test_words_arrive_in_order_and_past_one_launch() -> None:
    """Control words reach device memory through kernel arguments, however many they are."""
    words = list(range(-3, 2 * MAX_WORDS + 5))
    out = torch.full((len(words),), 99, dtype=torch.int32, device="cuda:0")
    write_words(out, words)
    assert out.tolist() == words
