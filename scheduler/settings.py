"""The settings of an engine: one frozen value, read once when it is opened, and where each part of it came from.

Precedence is explicit argument or flag, then environment, then configuration file, then default.
This module reads variables and a file when it is called, never when it is imported.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from . import setting_values as kinds
from .setting_values import HostBudget, Refused, SettingError, SlotBudget, ValueKind

__all__ = [
    "CONFIG_FILE_VARIABLE",
    "HostBudget",
    "Resolved",
    "SettingError",
    "SettingRow",
    "Settings",
    "SlotBudget",
    "describe",
    "reconfigure",
    "resolve",
    "setting_kind",
    "variable_name",
]

_PREFIX = "EXPERTSTREAM_"
CONFIG_FILE_VARIABLE = _PREFIX + "CONFIG_FILE"
# Switches of the test suite, documented as such; they are no settings and have no flag.
_TEST_VARIABLES = (_PREFIX + "TEST_THROTTLE_COPY",)
_AT_OPEN = "at open"
_NEVER = "never"


def _setting(default: object, kind: ValueKind, doc: str, unit: str = "", latches: str = _AT_OPEN) -> Any:
    return field(default=default, metadata={"kind": kind, "doc": doc, "unit": unit, "latches": latches})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting of an engine, parsed and checked; `resolve` makes one from text."""

    slots: SlotBudget = _setting(
        SlotBudget(), kinds.slot_budget, "Experts resident on the device.", "slots per MoE layer, bytes or share"
    )
    host_memory: HostBudget = _setting(
        HostBudget(), kinds.host_budget, "Host memory for expert records.", "bytes, or share of the experts' bytes"
    )
    device: str = _setting("auto", kinds.device, "Device that computes; auto is the first GPU, else the CPU.")
    dtype: str = _setting(
        "auto",
        kinds.choice("auto", "float32", "bfloat16", "float16"),
        "Data type that runs; auto is the checkpoint's on a GPU and float32 on the CPU.",
    )
    policy: str = _setting("lru", kinds.policy_name, "Which resident expert makes room for another.")
    decide: str = _setting(
        "auto",
        kinds.not_available(
            kinds.choice("auto", "host", "device"),
            lambda place: place != "device",
            "auto or host",
            "device is not available in this version",
        ),
        "Where residency is decided.",
    )
    speculate: int = _setting(
        0, kinds.integer(0, 8), "Tokens that the checkpoint's MTP head drafts in each iteration; 0 is off.", "tokens"
    )
    prefetch_bytes: int = _setting(
        0,
        kinds.not_available(kinds.size, lambda count: count == 0, "0", "prefetch is not available in this version"),
        "Bytes that speculative copies may take; 0 is off.",
        "bytes",
    )
    prefill_chunk: int = _setting(512, kinds.integer(16, 8192), "Prompt tokens in one prefill step.", "tokens")
    max_model_len: int | Literal["auto"] = _setting(
        "auto", kinds.length_or_auto, "Longest request, prompt and generated tokens together.", "tokens"
    )
    reader_threads: int = _setting(4, kinds.integer(1, 64), "Threads that read the checkpoint's files.", "threads")
    stats_every: int = _setting(
        16,
        kinds.integer(0),
        "Steps between two statistics records; 0 turns off the periodic record only.",
        "steps",
        _NEVER,
    )
    stats_min_s: float = _setting(
        1.0, kinds.seconds, "Shortest time between two statistics records; 0 is no floor.", "seconds", _NEVER
    )
    log_file: Path | None = _setting(None, kinds.log_path, "File that log entries are appended to as JSON lines.")
    log_format: str = _setting("json", kinds.choice("json", "console"), "Form of log entries on stderr.")
    log_level: str = _setting(
        "info",
        kinds.choice("debug", "info", "warning", "error"),
        "Lowest level of log entries; those that say what streaming came to are always written.",
    )
    deterministic: bool = _setting(
        False, kinds.boolean, "Same tokens for batch-mates and for speculation as for plain decoding."
    )


_FIELDS: Mapping[str, Field[Any]] = MappingProxyType({item.name: item for item in fields(Settings)})


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings that won, and where each came from.

    Attributes:
        settings: The values.
        sources: For each setting "argument", "environment NAME", "file PATH" or "default".
        warnings: One sentence for each unknown EXPERTSTREAM_* variable; whoever resolves logs them.
    """

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting as a person reads it: `value` is what is in force, `default` what would be."""

    name: str
    flag: str
    variable: str
    value: str
    default: str
    source: str
    unit: str
    latches: str
    doc: str


def variable_name(setting: str) -> str:
    """Returns the environment variable of a setting."""
    return _PREFIX + setting.upper()


def setting_kind(setting: str) -> ValueKind:
    """Returns the accepted forms of a setting, by its name."""
    return cast(ValueKind, _FIELDS[setting].metadata["kind"])


def resolve(
    explicit: Mapping[str, object], *, environ: Mapping[str, str] | None = None, config_file: Path | None = None
) -> Resolved:
    """Settles every setting: argument, then environment, then file, then default.

    A value that is None or blank text counts as not given, wherever it stands.

    Args:
        explicit: Arguments of a call, or flags; keys are names of settings.
        environ: Environment variables; None is `os.environ` as it is now.
        config_file: TOML file whose top-level keys are names of settings; None is the one that
            EXPERTSTREAM_CONFIG_FILE names, if it names one.

    Returns:
        The settings with their sources, and warnings about variables that no setting has.

    Raises:
        SettingError: A key is unknown, a value has none of the accepted forms, or the file cannot be read.
    """
    variables = os.environ if environ is None else environ
    values: dict[str, object] = {}
    sources = dict.fromkeys(_FIELDS, "default")
    # Lowest precedence first; a value that a higher one replaces is checked all the same.
    for name, value, source in (*_from_file(variables, config_file), *_from(variables), *_from_call(explicit)):
        if not kinds.is_blank(value):
            values[name] = _parsed(name, value, source)
            sources[name] = source
    settings = Settings(**cast(dict[str, Any], values))
    return Resolved(settings, MappingProxyType(sources), tuple(_unknown_variables(variables)))


_Given = Iterable[tuple[str, object, str]]


def _from_call(explicit: Mapping[str, object]) -> _Given:
    for name, value in explicit.items():
        _check_known(name, value, "argument")
        yield name, value, "argument"


def _from(variables: Mapping[str, str]) -> _Given:
    for name in _FIELDS:
        variable = variable_name(name)
        yield name, variables.get(variable), f"environment {variable}"


def _from_file(variables: Mapping[str, str], config_file: Path | None) -> _Given:
    named = variables.get(CONFIG_FILE_VARIABLE)
    path = Path(cast(str, named)) if config_file is None and not kinds.is_blank(named) else config_file
    if path is None:
        return
    source = f"file {path}"
    for name, value in _read_toml(path, source).items():
        _check_known(name, value, source)
        yield name, value, source


def _read_toml(path: Path, source: str) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as exc:
        raise SettingError("config_file", str(path), source, f"cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError) as exc:  # TOML, UTF-8 and nesting beyond what Python follows
        raise SettingError("config_file", str(path), source, f"is not TOML: {exc}") from exc


def _check_known(name: str, value: object, source: str) -> None:
    if name not in _FIELDS:
        nested = "; settings are top-level keys" if isinstance(value, Mapping) else ""
        raise SettingError(name, value, source, f"there is no such setting{_nearest(name, _FIELDS)}{nested}")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; the nearest is {close[0]}" if close else ""


def _parsed(name: str, value: object, source: str) -> object:
    kind = setting_kind(name)
    try:
        return kind.parse(value)
    except ValueError as exc:
        reason = f"{exc}; " if isinstance(exc, Refused) else ""
        problem = f"cannot use {value!r}; {reason}accepted: {kind.forms}"
        raise SettingError(name, value, source, problem) from exc


def _unknown_variables(variables: Mapping[str, str]) -> Iterable[str]:
    known = [variable_name(name) for name in _FIELDS] + [CONFIG_FILE_VARIABLE, *_TEST_VARIABLES]
    for name in sorted(variables):
        if name.startswith(_PREFIX) and name not in known and not kinds.is_blank(variables[name]):
            yield f"there is no variable {name}{_nearest(name, known)}"


def reconfigure(settings: Settings, later: Mapping[str, object]) -> Settings:
    """Returns the settings with later values for those that do not latch; a latched one may only be given as it is.

    Args:
        settings: In force.
        later: Names and values; None or blank text counts as not given.

    Raises:
        SettingError: A name is unknown, a value cannot be read, or a latched setting would change.
    """
    changes: dict[str, Any] = {}
    for name, value, source in _from_call(later):
        now, latches = getattr(settings, name), _FIELDS[name].metadata["latches"]
        if kinds.is_blank(value) or (parsed := _parsed(name, value, source)) == now:
            continue
        if latches != _NEVER:
            raise SettingError(name, value, source, f"cannot become {value!r}: it latched {latches} as {_shown(now)}")
        changes[name] = parsed
    return replace(settings, **changes)


def describe(resolved: Resolved) -> list[SettingRow]:
    """Returns a row for each setting, in the order of the dataclass, as `expertstream config` prints them."""
    return [_row(item, resolved) for item in _FIELDS.values()]


def _row(item: Field[Any], resolved: Resolved) -> SettingRow:
    return SettingRow(
        name=item.name,
        flag="--" + item.name.replace("_", "-"),
        variable=variable_name(item.name),
        value=_shown(getattr(resolved.settings, item.name)),
        default=_shown(item.default),
        source=resolved.sources[item.name],
        unit=item.metadata["unit"],
        latches=item.metadata["latches"],
        doc=item.metadata["doc"],
    )


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
