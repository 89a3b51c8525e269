"""A command-line flag for every setting, made from the settings themselves so that nothing is listed twice."""

# No `from __future__ import annotations` here: cyclopts would look for the names of a base's annotations elsewhere.
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from ..settings import Resolved, SettingRow, describe, resolve, setting_kind

__all__ = ["NO_FLAGS", "Flags", "SettingFlags", "with_switch_values"]

_GROUP = Group("Settings", help="Each is also an environment variable and a key of the configuration file.", sort_key=9)
_ROWS = describe(resolve({}, environ={}))
_SWITCHES = frozenset(row.flag for row in _ROWS if setting_kind(row.name).is_switch)


@dataclass(frozen=True, kw_only=True)
class _GivenFlags:
    """The flags of one command line, as text; None is a flag that was not given.

    Attributes:
        config_file: TOML file with settings as top-level keys; else the one that EXPERTSTREAM_CONFIG_FILE names.
    """

    config_file: Path | None = None

    def given(self) -> dict[str, object]:
        """Returns the settings that were given, by name."""
        values = {row.name: getattr(self, row.name) for row in _ROWS}
        return {name: value for name, value in values.items() if value is not None}

    def for_open(self) -> dict[str, object]:
        """Returns what was given, as arguments of `expertstream.open`."""
        return self.given() | ({} if self.config_file is None else {"config_file": self.config_file})

    def check(self) -> Resolved:
        """Returns the settings in force, so that a wrong one is reported before anything is imported or opened."""
        return resolve(self.given(), config_file=self.config_file)


def _field(row: SettingRow) -> tuple[str, Any, Any]:
    kind = setting_kind(row.name)
    text = f"{row.doc} Accepted: {kind.forms}. Default: {row.default}."
    if kind.is_switch:
        name = row.flag.removeprefix("--")
        parameter = Parameter(name=row.flag, negative=f"--no-{name}", help=text, group=_GROUP)
        return row.name, Annotated[bool | None, parameter], field(default=None)
    return row.name, Annotated[str | None, Parameter(name=row.flag, help=text, group=_GROUP)], field(default=None)


def _flags_class() -> type[_GivenFlags]:
    made = make_dataclass("SettingFlags", map(_field, _ROWS), bases=(_GivenFlags,), frozen=True, kw_only=True)
    made.__module__ = (
        __name__  # before 3.12 it would be "types", and cyclopts flattens no class of the standard library
    )
    return made


if TYPE_CHECKING:
    SettingFlags = _GivenFlags
else:
    SettingFlags = _flags_class()

Flags = Annotated[SettingFlags, Parameter(name="*")]
NO_FLAGS = SettingFlags()


def with_switch_values(arguments: Sequence[str]) -> Iterable[str]:
    """Yields a command line whose `--switch=VALUE` is `--switch` or `--no-switch`, or left out where VALUE is blank.

    cyclopts reads fewer words for yes and no than every other source of a setting does.

    Raises:
        SettingError: VALUE is no boolean.
    """
    for position, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if not equals or flag not in _SWITCHES or "--" in arguments[:position]:
            yield argument
        elif value.strip():
            name = flag.removeprefix("--").replace("-", "_")
            is_on = getattr(resolve({name: value}, environ={}).settings, name)
            yield flag if is_on else f"--no-{flag.removeprefix('--')}"
