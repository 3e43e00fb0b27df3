"""The places that ``kes offsets start`` is given, checked as far as no broker is needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, NamedTuple

import typer

from streams.errors import ConfigError
from streams.kafka.questions.admin import Watermarks
from streams.kafka.questions.group_checks import GroupChecks
from streams.model.places import Places, places_of, shown_place
from streams.runtime.changelog import BEGIN_KEY, BeginRecord, decode_begin
from streams.settings.config import EventSourceConfig

BEGINS_WITHIN: Final = 10_000
"""A begin record is the first one of a changelog: only attempts that were aborted can be before it. So a look reads no
more than so many offsets of it."""


def beginnings(
    checks: GroupChecks, config: EventSourceConfig, marks: Mapping[int, Watermarks]
) -> dict[int, BeginRecord]:
    """Return how partitions began, where that was decided on purpose. ``marks``: of the changelog. Raises
    ``OffsetError`` for records that cannot be read."""
    # Up to the stable end: what a killed command has left open is not waited for.
    heads = {number: (mark.start, min(mark.stable, mark.start + BEGINS_WITHIN)) for number, mark in marks.items()}
    found = checks.last_within(config.changelog, heads, BEGIN_KEY)
    return {number: decode_begin(record) for number, record in found.items() if record.value is not None}


class StartRequest(NamedTuple):
    """Places as they are requested. ``group``: whose offsets are taken; ``takes_over``: it must be at rest.
    ``missing``: the place of partitions in which it has no offset."""

    places: Places
    group: str
    takes_over: bool
    missing: int | None

    @property
    def how(self) -> str:
        return "adopt" if self.takes_over else "start"

    @property
    def rest_ms(self) -> int | None:
        """Return the place of all partitions that have none of their own, as ``Places.time_ms``."""
        return self.missing if self.group else self.places.time_ms

    @property
    def has_time(self) -> bool:
        """Check for a place that is a time."""
        return self.rest_ms is not None and self.rest_ms >= 0

    def place(self, topic: str, number: int, own: str, group_offset: int | None, rest: int) -> tuple[int, str] | None:
        """Return the offset where a partition begins, and the text that says so; ``None``: it has no place. ``own``:
        the source's own topic; ``rest``: the offset that ``rest_ms`` comes to."""
        if (offset := self.places.offset_in(topic, number, own)) is not None:
            return offset, f"{number}@{offset}"
        if self.group and group_offset is not None:
            return group_offset, f"group {self.group}"
        return None if self.rest_ms is None else (rest, shown_place(self.rest_ms))


def request_of(
    config: EventSourceConfig, inputs: list[str], at: list[str], like_group: str, from_group: str, missing: str
) -> StartRequest:
    """Check what is requested. Raises ``BadParameter``, ``ConfigError``."""
    try:
        places = places_of(at, config.topic)
        other = places_of([missing]) if missing else Places({}, None)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--at") from None
    group = like_group or from_group
    if like_group and from_group:
        raise typer.BadParameter("--like-group and --from-group exclude each other")
    if not at and not group:
        raise typer.BadParameter("name a place: --at, --like-group, or --from-group")
    if group and places.time_ms is not None:
        raise typer.BadParameter("with a group, --at names single partitions; for those without offset: --missing")
    if missing and (not group or other.time_ms is None):
        raise typer.BadParameter("--missing takes earliest, latest or a time, beside a group", param_hint="--missing")
    if like_group == config.group_id:
        raise typer.BadParameter("--like-group is the source's own group: to go on there, use --from-group")
    if group and config.source_is_elsewhere:
        raise ConfigError(
            f"the offsets of {group} in {config.topic} are on another cluster than the group {config.group_id}: name "
            "them with --at PARTITION@OFFSET"
        )
    for topic, number in places.offsets:
        if topic not in ("", config.topic, *inputs):
            raise typer.BadParameter(
                f"{topic!r} is no input that can begin anywhere: those are {', '.join([config.topic, *inputs])}",
                param_hint="--at",
            )
        if number >= config.num_partitions:
            raise typer.BadParameter(
                f"{topic or config.topic} has the partitions 0 to {config.num_partitions - 1}, not {number}",
                param_hint="--at",
            )
    now_ms = time.time() * 1000
    for ms in (places.time_ms, other.time_ms):
        if ms is not None and ms > now_ms:
            raise typer.BadParameter(f"{shown_place(ms)} is in the future: to pass what is there now, use latest")
    return StartRequest(places, group, bool(from_group), other.time_ms)
