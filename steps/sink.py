"""Log entries: one envelope, three places to go, and no failure of any of them that reaches the caller.

The only file that imports structlog.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import unicodedata
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO, cast, get_args

import structlog

from .json_values import JsonValue, jsonable
from .log_file import LogFile
from .log_stream import LogStream
from .process_local import ProcessLocal

__all__ = ["SCHEMA", "Level", "LogFormat", "LogSink", "bound_context", "context_bound", "write_final"]

SCHEMA = "expertstream/1"

Level = Literal["debug", "info", "warning", "error", "critical"]
LogFormat = Literal["json", "console"]
Entry = dict[str, JsonValue]

_LEVELS: tuple[Level, ...] = get_args(Level)
_ENVELOPE = ("schema", "event", "ts", "mono_ns", "seq", "run_id", "pid", "level")
_RESERVED = {*_ENVELOPE, "dropped", "dropped_targets", "lost"}

# ASCII: any stream can hold it, and no reader takes U+2028 for the end of a line.
_render_json = structlog.processors.JSONRenderer(ensure_ascii=True, allow_nan=False)
_render_console = structlog.dev.ConsoleRenderer(colors=False, sort_keys=False, timestamp_key="ts")


@dataclass(frozen=True, slots=True)
class _Process:
    """The identity that entries of one process share."""

    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    # `next` of a count is one operation of the interpreter: two threads never draw the same number.
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


_process = ProcessLocal(_Process)


@dataclass(frozen=True, slots=True)
class _Target:
    """One place that entries go to; targets with an equal key are one place."""

    name: Literal["host", "file", "stream"]
    key: tuple[str, object]
    place: str
    send: Callable[[Entry], None]


@dataclass(slots=True)
class _Losses:
    """Writes of one sink that failed in this process, by target, and those that each target has still to show."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    failed: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)
    unshown: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


class LogSink:
    """Sends log entries to the host application, to a file, to a text stream, or to several of them.

    Args:
        log_file: JSON lines are appended to it; its folder must exist.
        host: Whether entries go to structlog as the host application configured it.
        stream: A text stream of the command line's own.
        log_format: How entries look on `stream`.
        level: Entries below it are not made, for any of the three.

    Raises:
        ValueError: `level` or `log_format` is unknown.
    """

    def __init__(
        self,
        *,
        log_file: Path | str | None = None,
        host: bool = True,
        stream: TextIO | None = None,
        log_format: LogFormat = "json",
        level: Level = "info",
    ) -> None:
        if level not in _LEVELS:
            raise ValueError(f"level must be one of {', '.join(_LEVELS)}, not {level!r}.")
        if log_format not in get_args(LogFormat):
            raise ValueError(f"log_format must be json or console, not {log_format!r}.")
        self._threshold = _LEVELS.index(level)
        self._losses = ProcessLocal(_Losses)
        self._log_file = None if log_file is None else LogFile(log_file)
        self._targets: list[_Target] = []
        if host:
            self._targets.append(_Target("host", ("host", None), "structlog", _send_to_host))
        if self._log_file is not None:
            file_key = ("file", self._log_file.key)
            self._targets.append(
                _Target("file", file_key, str(jsonable(self._log_file.path)), _file_sender(self._log_file))
            )
        if stream is not None:
            text = LogStream(stream)
            key = ("stream", stream)
            self._targets.append(_Target("stream", key, str(jsonable(text.name)), _stream_sender(text, log_format)))

    @property
    def dropped(self) -> int:
        """Writes that failed in this process, over all targets."""
        return self._losses.get().failed.total()

    @property
    def target_keys(self) -> frozenset[tuple[str, object]]:
        """What it writes to: two sinks with an equal key share a target."""
        return frozenset(target.key for target in self._targets)

    def entry(self, event: str, level: Level = "info", /, **fields: object) -> None:
        """Logs one entry unless it is below the sink's level; never raises an `Exception`.

        Args:
            event: The name of the entry, as `store.built`.
            level: How much it matters.
            **fields: Anything; rendered by `jsonable`. A name that the envelope has gets a trailing underscore.
        """
        if level not in _LEVELS or _LEVELS.index(level) >= self._threshold:
            self.record(event, level, **fields)

    def record(self, event: str, level: Level = "info", /, **fields: object) -> None:
        """Logs one entry whatever the sink's level: for those that say what streaming in this process came to."""
        entry = _make_entry(event, level, fields)
        for target in self._targets:
            self._send(target, entry)

    def final(self, event: str, level: Level = "info", /, **fields: object) -> None:
        """Logs one entry whatever the level, and on stderr too when a target fails."""
        write_final([self], event, level, **fields)

    def close(self) -> None:
        """Closes the log file; a later entry opens it again."""
        if self._log_file is not None:
            self._log_file.close()

    def _send(self, target: _Target, entry: Entry) -> bool:
        losses = self._losses.get()
        with losses.lock:
            shown = Counter(losses.unshown[target.name])
        if shown:
            entry = {**entry, "dropped": shown.total(), "dropped_targets": [*sorted(shown)]}
        try:
            target.send(entry)
        except Exception as error:  # a log that fails must not fail a step: counted, and shown by the next that works
            with losses.lock:
                losses.failed[target.name] += 1
                losses.errors[target.name] = str(jsonable(error))
                for each in self._targets:
                    losses.unshown[each.name][target.name] += 1
            return False
        with losses.lock:
            losses.unshown[target.name] -= shown
        return True

    def _lost(self, target: _Target) -> JsonValue:
        losses = self._losses.get()
        return {
            "target": target.name,
            "place": target.place,
            "error": losses.errors.get(target.name, ""),
            "dropped": losses.failed[target.name],
        }

    def __repr__(self) -> str:
        names = ", ".join(target.name for target in self._targets) or "nowhere"
        return f"<LogSink to {names}: {self.dropped} dropped>"


def write_final(sinks: Iterable[LogSink], event: str, level: Level = "info", /, **fields: object) -> None:
    """Writes one entry to every distinct target of several sinks, once each, and to stderr where a target fails.

    Args:
        sinks: Their levels are not asked. Where none of them has a target, stderr is the target.
        event: The name of the entry.
        level: How much it matters.
        **fields: As in `LogSink.entry`. The line on stderr adds `lost`: what failed, where, why and how often.
    """
    entry = _make_entry(event, level, fields)
    tried: dict[tuple[str, object], bool] = {}
    lost: list[JsonValue] = []
    for sink in sinks:
        for target in sink._targets:
            if target.key in tried:
                continue
            tried[target.key] = sink._send(target, entry)
            if not tried[target.key]:
                lost.append(sink._lost(target))
    is_on_stderr = any(ok and key == ("stream", sys.stderr) for key, ok in tried.items())
    if lost and is_on_stderr:
        _say_on_stderr({"event": "log.lost", "lost": lost})  # the record stands there already
    elif lost or not tried:
        _say_on_stderr({**entry, "lost": lost})


def bound_context() -> dict[str, object]:
    """The names that the caller bound with structlog, to be handed to a task or thread that runs elsewhere."""
    return structlog.contextvars.get_contextvars()


@contextmanager
def context_bound(names: Mapping[str, object]) -> Iterator[None]:
    """Binds names for the entries logged inside, in this flow only."""
    with structlog.contextvars.bound_contextvars(**names):
        yield


def _make_entry(event: str, level: str, fields: Mapping[str, object]) -> Entry:
    process = _process.get()
    entry: Entry = {
        "schema": SCHEMA,
        "event": str(jsonable(event)),
        "ts": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "mono_ns": time.monotonic_ns(),
        "seq": next(process.numbers),
        "run_id": process.run_id,
        "pid": os.getpid(),
        "level": level if level in _LEVELS else "error",
    }
    for name, value in {**bound_context(), **fields}.items():
        text = str(jsonable(name))
        entry[f"{text}_" if text in _RESERVED else text] = jsonable(value)
    return entry


def _send_to_host(entry: Entry) -> None:
    rest = {name: value for name, value in entry.items() if name != "event"}
    getattr(structlog.get_logger("expertstream"), str(entry["level"]))(entry["event"], **rest)


def _file_sender(log_file: LogFile) -> Callable[[Entry], None]:
    return lambda entry: log_file.append(_line(entry, "json").encode("ascii"))


def _stream_sender(stream: LogStream, log_format: LogFormat) -> Callable[[Entry], None]:
    return lambda entry: stream.write(_line(entry, log_format))


def _line(entry: Entry, log_format: LogFormat) -> str:
    if log_format == "json":
        return f"{_json(entry)}\n"
    shown = {name: _shown(value) for name, value in entry.items()}
    # A control character in a value could move the cursor, or begin a line that looks like an entry.
    return "".join(_visible(char) for char in _render_console(None, str(entry["level"]), shown)) + "\n"


def _json(value: JsonValue) -> str:
    return cast(str, _render_json(None, "", cast("dict[str, JsonValue]", value)))


def _shown(value: JsonValue) -> JsonValue:
    return _json(value) if isinstance(value, (dict, list)) else value


def _visible(char: str) -> str:
    if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp", "Cs"):
        return char.encode("ascii", "backslashreplace").decode() if ord(char) > 127 else f"\\x{ord(char):02x}"
    return char


def _say_on_stderr(entry: Entry) -> None:
    for stream in (sys.stderr, sys.__stderr__):
        if stream is None:
            continue
        try:
            LogStream(stream).write(_line(entry, "json"))
        except Exception:  # the last resort: there is nowhere left to say it
            continue
        return
