"""From bytes to lines to JSON objects, for logs in any state: nothing that a file can hold raises here."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple, NoReturn

__all__ = ["MAX_LINE_BYTES", "Damage", "Line", "decompressed", "parse", "read_lines"]

MAX_LINE_BYTES = 16 * 2**20

_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_NOT_JSON = "not JSON"
_NOT_UTF8 = "not UTF-8"
_NULS = "holds NUL bytes"


class Line(NamedTuple):
    """One line.

    Attributes:
        number: From 1.
        content: Its bytes without the newline, "" where it is too long or could not be read.
        is_ended: Whether a newline ended it.
        fault: Why it could not be read, "" where it was.
    """

    number: int
    content: bytes
    is_ended: bool
    fault: str


class Damage(NamedTuple):
    """Why a line is no JSON object.

    Attributes:
        reason: In words.
        is_cuttable: Whether a line that was not written to its end looks like that.
    """

    reason: str
    is_cuttable: bool


def decompressed(file: IO[bytes]) -> IO[bytes]:
    """Returns a reader of the text in `file`: gzip is told by its first two bytes, not by a name."""
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
    if buffered.peek(2)[:2] != _GZIP_MAGIC:
        return buffered
    return io.BufferedReader(gzip.GzipFile(fileobj=buffered))


def read_lines(file: IO[bytes]) -> Iterator[Line]:
    """Yields every line; of one above 16 MiB, or where reading fails, only that it is there.

    Args:
        file: Read to its end, and left open.
    """
    number = 0
    try:
        text = decompressed(file)
        while content := text.readline(MAX_LINE_BYTES + 1):
            number += 1
            is_ended = content.endswith(b"\n")
            if len(content) <= MAX_LINE_BYTES or is_ended:
                yield Line(number, content.rstrip(b"\r\n"), is_ended, "")
            else:
                is_ended = _skip_rest(text)
                yield Line(number, b"", is_ended, f"longer than {MAX_LINE_BYTES} bytes")
    except EOFError:
        yield Line(number + 1, b"", True, "the compressed data ends too early")
    except (OSError, zlib.error) as error:
        yield Line(number + 1, b"", True, f"cannot be read: {error}")


def _skip_rest(text: IO[bytes]) -> bool:
    while rest := text.readline(2**20):
        if rest.endswith(b"\n"):
            return True
    return False


class _ConstantError(ValueError):
    """Raised at a NaN or an infinity, which Python reads and JSON has not."""


def _refuse(constant: str) -> NoReturn:
    raise _ConstantError(f"holds {constant}, which is not JSON")


_decode = json.JSONDecoder(parse_constant=_refuse).decode


def parse(content: bytes) -> dict[str, Any] | Damage | None:
    """Returns the object that a line is, None for a blank line, or why it is no object."""
    content = content.removeprefix(_BOM)
    if not content.strip():
        return None
    try:
        value = _decode(content.decode())
    except UnicodeDecodeError:
        return Damage(_NULS if b"\0" in content else _NOT_UTF8, True)
    except _ConstantError as error:
        return Damage(str(error), False)
    except (ValueError, RecursionError):  # a number of 5000 digits is a ValueError too
        return Damage(_NULS if b"\0" in content else _NOT_JSON, True)
    return value if isinstance(value, dict) else Damage("not a JSON object", False)
