"""Settings: precedence, accepted forms, unknown names, and what latches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_checks import checkout

from expertstream.scheduler.settings import (
    HostBudget,
    Resolved,
    SettingError,
    SettingRow,
    Settings,
    SlotBudget,
    describe,
    reconfigure,
    resolve,
    variable_name,
)

NAMES = [field.name for field in dataclasses.fields(Settings)]


def only(name: str, value: object, environ: Mapping[str, str] | None = None) -> object:
    return getattr(resolve({name: value}, environ=environ or {}).settings, name)


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "expertstream {settings}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_precedence_every_source_given_argument_wins(tmp_path: Path) -> None:
    """Contract 5.1: explicit argument or flag > environment > config file > default, and the source is told."""
    path = config(tmp_path, "speculate = 1\nstats_every = 1\nreader_threads = 1")
    environ = {"EXPERTSTREAM_SPECULATE": "2", "EXPERTSTREAM_STATS_EVERY": "2"}
    resolved = resolve({"speculate": 3, "device": None}, environ=environ, config_file=path)
    settings, sources = resolved.settings, resolved.sources
    assert (settings.speculate, settings.stats_every, settings.reader_threads) == (3, 2, 1)
    assert settings.prefill_chunk == 512
    assert sources["speculate"] == "argument"
    assert sources["stats_every"] == "environment EXPERTSTREAM_STATS_EVERY"
    assert sources["reader_threads"] == f"file {path}"
    assert sources["prefill_chunk"] == sources["device"] == "default"


@pytest.mark.parametrize(("name", "on"), [("deterministic", "true"), ("speculate", "4"), ("log_file", '"run.jsonl"')])
def test_environment_zero_turns_off_what_a_file_turned_on(tmp_path: Path, name: str, on: str) -> None:
    """Contract 5.1: an environment 0 turns off what a file turned on."""
    path = config(tmp_path, f"{name} = {on}")
    assert getattr(resolve({}, environ={}, config_file=path).settings, name)
    assert not getattr(resolve({}, environ={variable_name(name): "0"}, config_file=path).settings, name)


def test_config_file_variable_names_the_file_unless_an_argument_does(tmp_path: Path) -> None:
    """EXPERTSTREAM_CONFIG_FILE names the file; the argument is stronger; an empty variable is unset."""
    path = config(tmp_path, "speculate = 1")
    other = tmp_path / "other.toml"
    other.write_text("speculate = 2", encoding="utf-8")
    environ = {"EXPERTSTREAM_CONFIG_FILE": str(path)}
    assert resolve({}, environ=environ).settings.speculate == 1
    assert resolve({}, environ=environ, config_file=other).settings.speculate == 2
    assert resolve({}, environ={"EXPERTSTREAM_CONFIG_FILE": ""}).settings.speculate == 0
    assert resolve({}, environ=environ).warnings == ()


@pytest.mark.parametrize("text", ["1", "true", "YES", "On", " 1 "])
def test_boolean_true_in_any_case_is_on(text: str) -> None:
    """Contract 5.2: 1/true/yes/on in any case."""
    assert resolve({}, environ={"EXPERTSTREAM_DETERMINISTIC": text}).settings.deterministic is True


@pytest.mark.parametrize("text", ["0", "False", "no", "OFF"])
def test_boolean_false_in_any_case_is_off(text: str, tmp_path: Path) -> None:
    """Contract 5.2: 0/false/no/off in any case; `=false` must not mean on."""
    path = config(tmp_path, "deterministic = true")
    resolved = resolve({}, environ={"EXPERTSTREAM_DETERMINISTIC": text}, config_file=path)
    assert resolved.settings.deterministic is False


@pytest.mark.parametrize("text", ["", "  "])
def test_boolean_empty_is_unset(text: str, tmp_path: Path) -> None:
    """Contract 5.2: empty is unset, so that the file's value stays."""
    path = config(tmp_path, "deterministic = true")
    resolved = resolve({}, environ={"EXPERTSTREAM_DETERMINISTIC": text}, config_file=path)
    assert resolved.settings.deterministic is True
    assert resolved.sources["deterministic"] == f"file {path}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (8, SlotBudget("per_layer", 8)),
        ("8", SlotBudget("per_layer", 8)),
        ("8G", SlotBudget("bytes", 8 * 10**9)),
        ("8GB", SlotBudget("bytes", 8 * 10**9)),
        ("8 gb", SlotBudget("bytes", 8 * 10**9)),
        ("8GiB", SlotBudget("bytes", 8 * 2**30)),
        ("1.5KiB", SlotBudget("bytes", 1536)),
        ("100B", SlotBudget("bytes", 100)),
        ("50%", SlotBudget("share", 0.5)),
        ("100%", SlotBudget("share", 1.0)),
        ("auto", SlotBudget("auto")),
        ("AUTO", SlotBudget("auto")),
        (SlotBudget("share", 0.25), SlotBudget("share", 0.25)),
        ("0", SlotBudget("per_layer", 0)),
        ("-3", SlotBudget("per_layer", -3)),
    ],
)
def test_slots_accepted_form_means_slots_bytes_or_share(value: object, expected: SlotBudget) -> None:
    """Contract 5.2: a plain integer is slots per layer, a size is bytes, a percentage is a share.

    Zero and negative ones are read here: whoever knows the model refuses them with the smallest that works.
    """
    assert only("slots", value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("4096", HostBudget("bytes", 4096)),
        (4096, HostBudget("bytes", 4096)),
        ("8GiB", HostBudget("bytes", 2**33)),
        ("50%", HostBudget("share", 0.5)),
        ("auto", HostBudget()),
    ],
)
def test_host_memory_plain_integer_is_bytes(value: object, expected: HostBudget) -> None:
    """Contract 5.2: sizes are a plain byte count too where no number of slots could be meant."""
    assert only("host_memory", value) == expected


@pytest.mark.parametrize(
    ("name", "value", "form"),
    [
        ("slots", "8.5", "8GiB"),
        ("slots", "8X", "8GiB"),
        ("slots", "8iB", "8GiB"),
        ("slots", "half", "auto"),
        ("slots", True, "auto"),
        ("slots", 0.5, "50%"),
        ("slots", "101%", "100%"),
        ("host_memory", "-1", "negative"),
        ("device", "gpu", "cuda:N"),
        ("dtype", "fp16", "float16"),
        ("policy", "fifo", "lrfu"),
        ("decide", "device", "not available in this version"),
        ("speculate", 9, "0 to 8"),
        ("speculate", "1e0", "0 to 8"),
        ("prefetch_bytes", "8GiB", "not available in this version"),
        ("prefetch_bytes", "auto", "accepted: 0"),
        ("prefill_chunk", 15, "16 to 8192"),
        ("prefill_chunk", 8193, "16 to 8192"),
        ("max_model_len", 0, "auto"),
        ("reader_threads", 65, "1 to 64"),
        ("stats_every", -1, "0 or more"),
        ("stats_min_s", "nan", "seconds"),
        ("stats_min_s", float("inf"), "seconds"),
        ("stats_min_s", -0.1, "seconds"),
        ("log_file", 5, "path"),
        ("log_format", "xml", "console"),
        ("log_level", "loud", "warning"),
        ("deterministic", "maybe", "yes"),
        ("deterministic", 2, "yes"),
    ],
)
def test_value_of_no_accepted_form_is_an_error_that_shows_the_forms(name: str, value: object, form: str) -> None:
    """Contract 5.2: anything unparsable is an error with setting, value, source and forms, never the default."""
    with pytest.raises(SettingError) as caught:
        only(name, value)
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert "from argument" in message
    assert form in message


@given(st.text(max_size=12))
def test_slots_any_text_is_a_budget_or_a_setting_error(text: str) -> None:
    """Contract 5.2: no text ends in another exception, and only blank text is the default in silence."""
    try:
        resolved = resolve({"slots": text}, environ={})
    except SettingError:
        return
    assert (resolved.sources["slots"] == "default") == (not text.strip())


@given(st.integers(0, 10**6), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_size_binary_prefix_is_a_power_of_two(number: int, prefix: str) -> None:
    """Contract 5.2: KiB, MiB, GiB, TiB are powers of 1024, without rounding."""
    power = ["KiB", "MiB", "GiB", "TiB"].index(prefix) + 1
    assert only("host_memory", f"{number}{prefix}") == HostBudget("bytes", number * 1024**power)


@pytest.mark.parametrize("text", ["slot = 8", "SLOTS = 8", '"host-memory" = "1G"'])
def test_unknown_key_in_a_file_is_an_error_with_the_nearest_name(tmp_path: Path, text: str) -> None:
    """Contract 5.3: an unknown key in a file is an error with the nearest name and the file."""
    path = config(tmp_path, text)
    with pytest.raises(SettingError) as caught:
        resolve({}, environ={}, config_file=path)
    assert str(path) in str(caught.value)
    assert text == "SLOTS = 8" or "nearest is slots" in str(caught.value) or "host_memory" in str(caught.value)


def test_nested_key_in_a_file_says_that_settings_are_top_level(tmp_path: Path) -> None:
    """Contract 5.3: a table is an unknown key, and the message says where settings stand."""
    path = config(tmp_path, "[expertstream]\nslots = 8")
    with pytest.raises(SettingError, match="top-level"):
        resolve({}, environ={}, config_file=path)


def test_unknown_name_in_a_call_is_an_error_with_the_nearest_name() -> None:
    """Contract 5.3: an unknown name in a call is an error with the nearest name."""
    with pytest.raises(SettingError, match="nearest is slots"):
        resolve({"slot": 8}, environ={})


def test_unknown_variable_is_one_warning() -> None:
    """Contract 5.3: an unknown EXPERTSTREAM_* variable is one warning; documented and blank ones are none."""
    environ = {
        "EXPERTSTREAM_SLOT": "8",
        "EXPERTSTREAM_BLANK": "",
        "EXPERTSTREAM_TEST_THROTTLE_COPY": "1",
        "EXPERTSTREAM_SLOTS": "8",
        "OTHER": "1",
    }
    (warning,) = resolve({}, environ=environ).warnings
    assert "EXPERTSTREAM_SLOT;" in warning
    assert "EXPERTSTREAM_SLOTS" in warning


@pytest.mark.parametrize("content", [None, b"slots = ", b"slots = \xff", b"slots = " + b"[" * 100_000])
def test_config_file_that_cannot_be_read_is_an_error_with_its_path(tmp_path: Path, content: bytes | None) -> None:
    """A file that is absent, no TOML or no UTF-8 is an error that names it."""
    path = tmp_path / "settings.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingError, match=r"settings\.toml"):
        resolve({}, environ={}, config_file=path)


def test_latched_setting_refuses_a_different_value_by_name() -> None:
    """Contract 5.4: what latched refuses a different value by name, and accepts an equal one or an omission."""
    settings = resolve({"slots": "50%"}, environ={}).settings
    assert reconfigure(settings, {"slots": " 50 %", "device": None}) == settings
    with pytest.raises(SettingError, match=r"setting slots: .*latched at open as 50%"):
        reconfigure(settings, {"slots": "25%"})
    with pytest.raises(SettingError, match="nearest is slots"):
        reconfigure(settings, {"slot": "50%"})


def test_settings_and_their_sources_cannot_be_changed() -> None:
    """Settings are values: nothing changes them after they are resolved."""
    resolved: Resolved = resolve({}, environ={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.settings.device = "cpu"  # type: ignore[misc]
    with pytest.raises(TypeError):
        resolved.sources["device"] = "argument"  # type: ignore[index]


def test_defaults_are_what_resolving_nothing_gives() -> None:
    """A default stands in one place: `Settings()` is what `resolve` returns for nothing."""
    assert resolve({}, environ={}).settings == Settings()


@pytest.mark.parametrize("row", describe(resolve({}, environ={})), ids=lambda row: row.name)
def test_docs_every_setting_has_a_row_with_flag_variable_default_unit_and_latch(row: SettingRow) -> None:
    """Contract 5.1: each setting has a row in docs/configuration.md that says what the code says."""
    text = (checkout() / "docs" / "configuration.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{row.name}` |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == [f"`{row.name}`", f"`{row.flag}`", f"`{row.variable}`", row.default]
    assert cells[5:] == [row.unit, row.latches]


def test_a_setting_that_does_not_latch_changes_later() -> None:
    """Contract 5.4: what does not latch may change; what latches next to it still may not."""
    settings = resolve({"slots": "50%"}, environ={}).settings
    later = reconfigure(settings, {"stats_every": "5", "stats_min_s": 0})
    assert (later.stats_every, later.stats_min_s, later.slots) == (5, 0.0, settings.slots)
    with pytest.raises(SettingError, match="latched at open"):
        reconfigure(settings, {"stats_every": 5, "policy": "lrfu"})


@pytest.mark.parametrize("name", ["slots", "host_memory", "max_model_len", "stats_every"])
def test_number_beyond_what_a_machine_counts_is_an_error_and_not_a_failure_to_print_it(name: str) -> None:
    """A number of thousands of digits is refused where it is read: Python refuses to print what it would come to."""
    value = "9" * 4299 + ("T" if name in ("slots", "host_memory") else "")
    with pytest.raises(SettingError, match=f"setting {name}: .*it is more than {2**63 - 1}"):
        resolve({name: value}, environ={})
