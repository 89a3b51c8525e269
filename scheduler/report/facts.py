"""What a `store.built` entry said, as far as it is shown or needed for a check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .counts import describe, is_count

__all__ = ["NO_FACTS", "Facts", "read_facts", "wrong_facts"]

_TEXTS = ("model", "path", "model_type", "dtype", "device", "policy", "decide")
_COUNTS = ("layers", "experts", "slots", "device_bytes", "host_bytes", "dense_bytes", "max_model_len")
_LISTS = ("experts_per_layer", "top_k", "record_bytes", "slots_per_layer")
_MAX_TEXT = 200
_MAX_VERSIONS = 32


@dataclass(frozen=True, slots=True)
class Facts:
    """Fields of `store.built`.

    Attributes:
        texts: Model, dtype, device, policy and the like, those that were there.
        counts: Numbers of layers, experts, slots and bytes, those that were there.
        versions: Of the packages.
        record_bytes: Bytes of the smallest and of the largest expert record.
        stats_every: Steps between two periodic records; 0 turns them off; None where the entry does not say.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    record_bytes: tuple[int, int] | None = None
    stats_every: int | None = None


NO_FACTS = Facts()


def read_facts(entry: Mapping[str, object]) -> Facts:
    """Returns what an entry says, without what is of a wrong type."""
    texts = {name: entry.get(name) for name in _TEXTS}
    counts = {name: entry.get(name) for name in _COUNTS}
    listed = entry.get("record_bytes")
    sizes = [size for size in listed if is_count(size, 1)] if isinstance(listed, list) else []
    versions = entry.get("versions")
    pairs = list(versions.items())[:_MAX_VERSIONS] if isinstance(versions, dict) else []
    return Facts(
        texts={name: value[:_MAX_TEXT] for name, value in texts.items() if isinstance(value, str)},
        counts={name: value for name, value in counts.items() if is_count(value)},
        versions={name[:_MAX_TEXT]: version[:_MAX_TEXT] for name, version in pairs if isinstance(version, str)},
        record_bytes=(min(sizes), max(sizes)) if sizes else None,
        stats_every=_stats_every(entry.get("settings")),
    )


def wrong_facts(entry: Mapping[str, object]) -> Iterator[str]:
    """Yields the fields that are there and are of a wrong type: a number that became text is found here."""
    for name in _TEXTS:
        if not isinstance(entry.get(name), str | None):
            yield f"{name} is {describe(entry[name])}, not text"
    for name in _COUNTS:
        if entry.get(name) is not None and not is_count(entry[name]):
            yield f"{name} is {describe(entry[name])}, not a count"
    for name in _LISTS:
        sizes = entry.get(name, [])
        if not (isinstance(sizes, list) and all(is_count(size) for size in sizes)):
            yield f"{name} is {describe(sizes)}, not a list of counts"


def _stats_every(settings: object) -> int | None:
    setting = settings.get("stats_every") if isinstance(settings, Mapping) else None
    text = str(setting.get("value") if isinstance(setting, Mapping) else setting)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
