"""Writes sections: tables on a terminal, and elsewhere plain text that `grep` reads as well as a person does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from .sections import Section

__all__ = ["visible", "write_sections"]


def write_sections(sections: Iterable[Section], out: TextIO) -> None:
    """Writes every section to `out`."""
    if out.isatty():
        _write_tables(sections, out)
        return
    for section in sections:
        rows = [(visible(name), visible(value)) for name, value in section.rows]
        width = max((len(name) for name, _ in rows), default=0)
        lines = [visible(section.title), *(f"  {name:<{width}}  {value}" for name, value in rows)]
        out.write(_encodable("\n".join(lines) + "\n\n", out))


def visible(text: str) -> str:
    """Returns text without characters that move a cursor: what a log holds may have been written by anybody."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _write_tables(sections: Iterable[Section], out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=out)
    for section in sections:
        # Text, so that brackets of a log are no markup.
        title = Text(_encodable(visible(section.title), out), "bold")
        if not section.rows:
            console.print(title)
            continue
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for name, value in section.rows:
            table.add_row(Text(_encodable(visible(name), out)), Text(_encodable(visible(value), out)))
        console.print(table)


def _encodable(text: str, out: TextIO) -> str:
    encoding = out.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
