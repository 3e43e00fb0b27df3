"""The places that ``kes offsets start`` and ``kes reset`` are given, checked as far as no broker is needed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import typer

from streams.errors import ConfigError, OffsetError, TopicError, TopicReplaced
from streams.kafka.questions.admin import TopicAdmin, Watermarks
from streams.kafka.questions.group_checks import GroupChecks
from streams.model.places import EARLIEST, LATEST, Places, places_of, shown_place
from streams.model.topology import Topology
from streams.runtime.changelog import BEGIN_KEY, BeginRecord, OffsetRecord, decode_begin
from streams.runtime.source_topics import INPUT
from streams.settings.config import EventSourceConfig

LONG_SECONDS: Final = 870.0
"""Time of a transaction with state in it: a little less than brokers allow (``transaction.max.timeout.ms``)."""
_MOST_NAMED: Final = 5

At = dict[str, dict[int, tuple[int, str]]]
"""By input and partition: the first offset, and the text of the place that says so."""


def beginnings(
    checks: GroupChecks, config: EventSourceConfig, marks: Mapping[int, Watermarks]
) -> dict[int, BeginRecord]:
    """Return how partitions began, where that was decided on purpose. ``marks``: of the changelog. Raises
    ``OffsetError`` for records that cannot be read."""
    # Up to the stable end: what a killed command has left open is not waited for. A begin record is the first one that
    # is committed in a changelog: only attempts that were aborted can be before it.
    heads = {number: (mark.start, mark.stable) for number, mark in marks.items()}
    found = checks.first_within(config.changelog, heads)
    return {number: decode_begin(record) for number, record in found.items() if record.key == BEGIN_KEY}


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


def refuse_muted(config: EventSourceConfig, record: OffsetRecord | None) -> None:
    """Raise ``OffsetError`` for a position of a muted source: what commands write would let it speak."""
    if record is not None and record.is_muted:
        raise OffsetError(
            f"{config.changelog}: the source is muted, and follows another one: its positions are not set by hand. "
            "Begin the rebuild anew with another group_id"
        )


def known_offset(
    config: EventSourceConfig, record: OffsetRecord | None, topic: str, number: int, topic_id: str, changelog_id: str
) -> int | None:
    """Return the next offset of a partition in an input by its offset record; ``None``: it has none there. The ids: of
    the input and the changelog now. Raises ``TopicReplaced``."""
    refuse_muted(config, record)
    at = None if record is None else record.position_in(topic, number)
    if record is not None and topic == config.topic:
        at = record.offset, record.source_id
        if record.changelog_id not in ("", changelog_id):
            at = record.offset, "another one"
    if at is not None and at[1] not in ("", topic_id):
        raise TopicReplaced(
            f"{topic}[{number}]: the state in {config.changelog} belongs to other topics of these names; "
            "see `kes offsets accept --restored`"
        )
    return None if at is None else at[0]


def place_option(name: str) -> Any:
    """Return an option for places."""
    text = "A time (2026-11-20T00:00Z), earliest, latest, or [TOPIC:]PARTITION@OFFSET. Repeatable."
    return typer.Option(name, metavar="PLACE", help=text)


def further_inputs(topology: Topology, own: str) -> list[str]:
    """Return the inputs that can begin anywhere, beside the source's ``own`` topic."""
    return [one.name for one in topology.topics if one.purpose == INPUT and one.name != own]


def request_of(
    config: EventSourceConfig, inputs: list[str], at: list[str], like_group: str, from_group: str, missing: str
) -> StartRequest:
    """Check what is requested. Raises ``BadParameter``, ``ConfigError``."""
    places = _parsed(at, config.topic, "--at")
    other = _parsed([missing], "", "--missing") if missing else Places({}, None)
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
    _check_partitions(config, inputs, places, "--at")
    _refuse_future(places)
    _refuse_future(other)
    return StartRequest(places, group, bool(from_group), other.time_ms)


def request_of_places(config: EventSourceConfig, inputs: list[str], texts: list[str], option: str) -> StartRequest:
    """Check places that are requested by an ``option`` alone, without a group. Raises ``BadParameter``."""
    places = _parsed(texts, config.topic, option)
    if not texts:
        raise typer.BadParameter("name a place", param_hint=option)
    _check_partitions(config, inputs, places, option)
    _refuse_future(places)
    return StartRequest(places, "", takes_over=False, missing=None)


def _parsed(texts: list[str], own: str, option: str) -> Places:
    try:
        return places_of(texts, own)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _check_partitions(config: EventSourceConfig, inputs: list[str], places: Places, option: str) -> None:
    for topic, number in places.offsets:
        if topic not in ("", config.topic, *inputs):
            raise typer.BadParameter(
                f"{topic!r} is no input that can begin anywhere: those are {', '.join([config.topic, *inputs])}",
                param_hint=option,
            )
        if number >= config.num_partitions:
            raise typer.BadParameter(
                f"{topic or config.topic} has the partitions 0 to {config.num_partitions - 1}, not {number}",
                param_hint=option,
            )


def _refuse_future(places: Places) -> None:
    ms = places.time_ms
    if ms is not None and ms > time.time() * 1000:
        raise typer.BadParameter(f"{shown_place(ms)} is in the future: to pass what is there now, use latest")


def places_in(
    config: EventSourceConfig,
    topics: Iterable[str],
    wanted: StartRequest,
    admin: TopicAdmin,
    timeout: float,
    offsets: Mapping[str, Mapping[int, int | None]],
    *,
    all_of_them: bool = True,
) -> At:
    """Return the places of all partitions in these inputs; ``offsets``: those of the group that is begun like. Raises
    ``OffsetError`` for those that are not there, all of them named; ``all_of_them``: also for those without a place,
    which are left out otherwise."""
    found: At = {}
    wrong: list[str] = []
    for topic in topics:
        marks = admin.watermarks(topic, None, timeout)
        if len(marks) < config.num_partitions:
            raise TopicError(f"{topic} has {len(marks)} partitions, the source has {config.num_partitions}")
        given, rest = offsets.get(topic, {}), _rest(wanted.rest_ms, topic, marks, admin, timeout)
        found[topic] = {}
        for number in range(config.num_partitions):
            low, high = marks[number].start, marks[number].end
            place = wanted.place(topic, number, config.topic, given.get(number), rest.get(number, low))
            if place is None:
                wrong += [f"{topic}[{number}] has no place"] if all_of_them else []
            elif not low <= place[0] <= high:
                text = f"{place[1]} is offset {place[0]}, and the log has {low} to {high} only"
                wrong.append(f"{topic}[{number}]: {text}")
            else:
                found[topic][number] = place
    if wrong:
        more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        remedy = "--missing earliest or latest" if wanted.group else "--at earliest or latest"
        hint = f". Name single partitions with --at [TOPIC:]PARTITION@OFFSET, and all that have no place with {remedy}"
        raise OffsetError(f"{'; '.join(wrong[:_MOST_NAMED])}{more}{hint if all_of_them else ''}")
    return found


def _rest(
    time_ms: int | None, topic: str, marks: Mapping[int, Watermarks], admin: TopicAdmin, timeout: float
) -> dict[int, int]:
    """Return the offsets of partitions that have no place of their own, unless they begin at the start."""
    if time_ms is None or time_ms == EARLIEST:
        return {}
    stable = {number: mark.stable for number, mark in marks.items()}
    if time_ms == LATEST:
        return stable
    found = admin.offsets_at(topic, time_ms, timeout)
    return stable | {number: offset for number, offset in found.items() if offset >= 0}
