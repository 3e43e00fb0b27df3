"""Options of a read: ``spark.read`` and ``spark.readStream`` of ``format("grt")``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from streams.errors import ConfigError
from streams.spark.options import checked, kafka_settings, number

Position = Literal["earliest", "latest"]
Offsets = Position | dict[str, dict[int, int]]
"""Where a range begins or ends: a word, or offsets by topic and partition (-2 earliest, -1 latest)."""

EARLIEST, LATEST = -2, -1

_READ: Final = ("subscribe", "startingOffsets", "endingOffsets", "isolation", "types", "stallSeconds")


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What to read. ``kafka`` may hold secrets and stays out of ``repr``."""

    kafka: dict[str, str] = field(repr=False)
    topics: tuple[str, ...]
    starting: Offsets
    ending: Offsets
    committed_only: bool
    types: frozenset[str] | None
    stall_seconds: float


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Raises ``ConfigError`` that names the option at fault."""
    plain = checked(options, _READ, "reading")
    topics = tuple(name.strip() for name in plain.get("subscribe", "").split(",") if name.strip())
    if not topics:
        raise ConfigError("option subscribe is missing: name the topic, or several with commas between them")
    isolation = plain.get("isolation", "read_committed")
    if isolation not in ("read_committed", "read_uncommitted"):
        raise ConfigError(f"option isolation must be read_committed or read_uncommitted, not {isolation!r}")
    types = frozenset(name.strip() for name in plain.get("types", "").split(",") if name.strip())
    return ReadOptions(
        kafka=kafka_settings(plain),
        topics=topics,
        starting=_offsets("startingOffsets", plain.get("startingoffsets", "earliest"), topics),
        ending=_offsets("endingOffsets", plain.get("endingoffsets", "latest"), topics),
        committed_only=isolation == "read_committed",
        types=types or None,
        stall_seconds=number("stallSeconds", plain.get("stallseconds", "60"), minimum=1.0),
    )


def _offsets(name: str, text: str, topics: Iterable[str]) -> Offsets:
    text = text.strip()
    if text.lower() in ("earliest", "latest"):
        return cast(Position, text.lower())
    try:
        raw = json.loads(text)
        offsets = {str(t): {int(p): int(o) for p, o in partitions.items()} for t, partitions in raw.items()}
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(
            f'option {name} must be earliest, latest or JSON like {{"topic": {{"0": 42}}}} '
            f"(-2 earliest, -1 latest), not {text!r}"
        ) from None
    if set(offsets) != set(topics):
        raise ConfigError(f"option {name} names the topics {sorted(offsets)}, but subscribe names {sorted(topics)}")
    for topic, partitions in offsets.items():
        for partition, offset in partitions.items():
            if offset < EARLIEST:
                raise ConfigError(f"option {name}: {topic}[{partition}] has the impossible offset {offset}")
    return offsets
