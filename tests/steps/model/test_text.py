"""Text to token ids and back: what is held back, what needs a tokenizer, and how chat messages are put."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny import TINY, tokenizer

from expertstream.memory.checkpoint import Checkpoint
from expertstream.memory.errors import CheckpointError
from expertstream.steps.model.text import NoTokenizerError, TextCodec

TEXT = "def größe():\n    return '日本語 🎈'\n" * 3


def codec(path: Path = TINY) -> TextCodec:
    return TextCodec(Checkpoint.open(path))


def test_stream_holds_a_character_back_until_its_bytes_are_there() -> None:
    """No text shows half a character, and the texts add up to the whole."""
    ids = codec().encode(TEXT)
    stream = codec().stream()
    texts = [stream.push(token_id, is_last=number == len(ids) - 1) for number, token_id in enumerate(ids)]
    assert "".join(texts) == tokenizer().decode(ids)
    assert "" in texts, "a character of several tokens is what this is about"
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)


def test_stream_of_a_cut_character_says_so_at_the_last_token_only() -> None:
    """What never becomes a character is shown when the length ends it, as the tokenizer shows it."""
    ids = codec().encode("🎈")
    assert len(ids) > 1
    stream = codec().stream()
    assert stream.push(ids[0]) == ""
    assert codec().stream().push(ids[0], is_last=True) == "\N{REPLACEMENT CHARACTER}"


def test_checkpoint_without_tokenizer_files_takes_no_text(tmp_path: Path) -> None:
    """Text without tokenizer files is an error that says what to give instead; token ids still stream, without text."""
    shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    without = codec(tmp_path / "model")
    with pytest.raises(NoTokenizerError, match="give token ids instead of text"):
        without.encode("text")
    assert without.stream().push(5) == ""


def test_chat_messages_go_through_the_tokenizers_own_template(tmp_path: Path) -> None:
    """Messages are put as the checkpoint's template puts them, with the reply opened; without one they are refused."""
    shutil.copytree(TINY, tmp_path / "model")
    config = tmp_path / "model" / "tokenizer_config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    values["chat_template"] = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<reply>{% endif %}"
    )
    config.write_text(json.dumps(values), encoding="utf-8")
    messages = [{"role": "user", "content": "hi"}]
    assert codec(tmp_path / "model").encode_chat(messages) == codec().encode("<user>hi<reply>")
    with pytest.raises(ValueError, match="no chat template"):
        codec().encode_chat(messages)


def test_half_of_a_surrogate_pair_is_refused_by_its_place() -> None:
    """Text that has no UTF-8 form, as an argument of undecodable bytes, is a ValueError that says where."""
    with pytest.raises(ValueError, match="half of a surrogate pair at character 1"):
        codec().encode("a\ud800b")


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_damaged_tokenizer_file_is_a_checkpoint_error(content: str, tmp_path: Path) -> None:
    """A tokenizer that transformers does not take is an error about the folder, whatever class it raised."""
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="transformers does not take its tokenizer files"):
        codec(tmp_path).encode("a")
