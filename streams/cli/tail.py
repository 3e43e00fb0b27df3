"""``kes tail``: the committed records of a topic, decoded if a source is named."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import datetime
from typing import Annotated, Any, Final, NamedTuple

import typer

from streams.cli.cluster import Servers, Timeout, await_listener, named_source
from streams.cli.console import as_json
from streams.cli.failures import discard
from streams.errors import Stopped, TopicError
from streams.kafka.questions.admin import TopicAdmin, Watermarks
from streams.kafka.reading.fetch_session import FOLLOWING
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.looks.addresses import brokers, client_settings_of
from streams.looks.records import Decoder, facts_of, one_line, partition_offset_of, shown_time
from streams.looks.scans import OffsetProgress
from streams.records import IncomingRecord
from streams.sak.harmless import harmless
from streams.source.event_source import EventSource

app = typer.Typer()

_LAST: Final = 10
"""Records that are shown where the command line does not say from where on."""
_NO_LIMIT: Final = 10**15
_PAUSE_SECONDS: Final = 0.2
_STRETCH: Final = 1_000
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}

_Words = Annotated[
    list[str], typer.Argument(metavar="[MODULE:SOURCE] [TOPIC]", help="A topic, or an event source, for its topic.")
]
_WHEN: Final = (
    "an offset, PARTITION@OFFSET, a time (2026-11-24T10:00, local unless it says Z or +01:00), or an age (10m)"
)


class Bound(NamedTuple):
    """One end of what is shown. ``partition``: the only one that it is for. One of ``offset`` and ``ms`` is set."""

    partition: int | None = None
    offset: int | None = None
    ms: int | None = None


def bound_of(text: str, option: str, now: float) -> Bound:
    """Parse a ``--from`` or an ``--until``. Raises ``BadParameter``."""
    at = partition_offset_of(text)
    if at is not None:
        return Bound(at.partition, at.offset)
    if text.isascii() and text.isdecimal() and len(text) < 19:
        return Bound(offset=int(text))
    ago = _AGO.fullmatch(text)
    with contextlib.suppress(ValueError, OverflowError):
        when = now - float(ago[1]) * _UNITS[ago[2]] if ago else datetime.fromisoformat(text).timestamp()
        return Bound(ms=max(int(when * 1000), 0))
    raise typer.BadParameter(f"{text!r} is not {_WHEN}", param_hint=option)


def time_of(text: str, option: str) -> int:
    """Parse a time as ``--from`` takes it, in milliseconds since the epoch. Raises ``BadParameter``."""
    bound = bound_of(text, option, time.time())
    if bound.ms is None:
        raise typer.BadParameter(
            f"{text!r} is not a time; use 2026-11-24T10:00Z, or an age such as 10m", param_hint=option
        )
    return bound.ms


@app.command()
def tail(
    words: _Words,
    from_: Annotated[str, typer.Option("--from", help=f"Start at {_WHEN}.")] = "",
    until: Annotated[str, typer.Option("--until", help="Stop before this point (as --from).")] = "",
    key: Annotated[str | None, typer.Option("--key", help="Only records with this key (text).")] = None,
    partition: Annotated[
        list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this partition. Repeatable.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=1, help="Maximum number of records. Default: 10; all with --from."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new records, until Ctrl-C.")] = False,
    headers: Annotated[bool, typer.Option("--headers", help="Show headers (--json always does).")] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 15.0,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per record.")] = False,
) -> None:
    """Show the committed records of a topic: the last ones, or all from a given point on.

    With a source, values are decoded as its handlers would decode them; records that cannot be decoded are marked.
    Records of open and aborted transactions are left out. Control characters are shown as escapes.

    Exit codes: 0 shown, also if there are none; 1 no such topic or partition, or no broker answers; 2 wrong usage.
    """
    source, topic = _named(words)
    now = time.time()
    low = bound_of(from_, "--from", now) if from_ else None
    high = bound_of(until, "--until", now) if until else None
    if follow and high is not None:
        raise typer.BadParameter("--follow cannot have an end", param_hint="--until")
    settings = _settings(source, topic, bootstrap_servers)
    await_listener(settings.bootstrap_servers, timeout)
    decoder = Decoder(source)

    def show(record: IncomingRecord) -> None:
        content = decoder.content(record)
        if json:
            sys.stdout.write(as_json(facts_of(record, content)))
            return
        kind = content.type or "-"
        words = [f"{record.partition}@{record.offset}", shown_time(record.timestamp_ms), harmless(record.key), kind]
        words.append(one_line(content.value))
        if headers:
            facts = facts_of(record, content)["headers"]
            words.append(" ".join(f"{harmless(name)}={one_line(value)}" for name, value in facts))
        if content.problem:
            words.append(f"(cannot be read: {harmless(content.problem)})")
        sys.stdout.write("  ".join(words) + "\n")

    with closing(TopicAdmin(settings)) as admin, closing(PartitionReader(settings)) as reader:
        marks = _chosen(topic, admin.watermarks(topic, None, timeout), partition, low, high)
        shown = _Shown(key, _NO_LIMIT if low is None else limit or _NO_LIMIT, show)
        try:
            starts = _offsets(admin, topic, marks, low, "start", timeout)
            ends = _offsets(admin, topic, marks, high, "stable", timeout)
            scan = _Scan(reader, topic, timeout)
            if low is None:
                spans = {number: (marks[number].start, ends[number]) for number in marks}
                for record in scan.last(spans, limit or _LAST, shown.takes):
                    shown.receive(record)
            else:
                scan.forward({number: (starts[number], ends[number]) for number in marks}, shown)
            sys.stdout.flush()
            if follow and not shown.is_full:
                _follow(settings, topic, {number: max(starts[number], ends[number]) for number in marks}, shown)
        except BrokenPipeError:  # `kes tail ... | head`: the reader has enough
            discard(sys.stdout)


class _Shown:
    """Shows the records that are chosen, up to the limit."""

    def __init__(self, key: str | None, limit: int, show: Callable[[IncomingRecord], None]) -> None:
        self._limit = limit
        self._key = None if key is None else os.fsencode(key)
        self._show = show
        self._count = 0

    @property
    def is_full(self) -> bool:
        return self._count >= self._limit

    def takes(self, record: IncomingRecord) -> bool:
        return self._key is None or record.key == self._key

    def receive(self, record: IncomingRecord) -> None:
        if self.takes(record) and not self.is_full:
            self._count += 1
            self._show(record)


class _Scan:
    """Bounded reads of the committed records, with progress when they take long."""

    def __init__(self, reader: PartitionReader, topic: str, seconds: float) -> None:
        self._reader, self._topic, self._seconds = reader, topic, seconds

    def forward(self, spans: Mapping[int, tuple[int, int]], shown: _Shown) -> None:
        """Show from the start of each span on, until all is shown, or enough."""

        def receive(_: int, records: list[IncomingRecord]) -> None:
            for record in records:
                shown.receive(record)

        self._read(spans, receive, lambda: shown.is_full)

    def last(
        self, spans: Mapping[int, tuple[int, int]], count: int, takes: Callable[[IncomingRecord], bool]
    ) -> list[IncomingRecord]:
        """Return the last chosen records of all spans, by time. Reads backwards, in ever longer stretches."""
        left, stretch = dict(spans), max(_STRETCH, 2 * count)
        found: dict[int, list[IncomingRecord]] = {number: [] for number in spans}
        while left := {number: (low, high) for number, (low, high) in left.items() if low < high}:
            pieces = {number: (max(low, high - stretch), high) for number, (low, high) in left.items()}
            for number, records in self._chosen_of(pieces, takes).items():
                found[number] = [*records, *found[number]][-count:]
            left = {
                number: (left[number][0], start) for number, (start, _) in pieces.items() if len(found[number]) < count
            }
            stretch *= 8
        by_time = heapq.merge(*found.values(), key=lambda record: record.timestamp_ms)  # keeps each partition's order
        return list(by_time)[-count:]

    def _chosen_of(
        self, spans: Mapping[int, tuple[int, int]], takes: Callable[[IncomingRecord], bool]
    ) -> dict[int, list[IncomingRecord]]:
        found: dict[int, list[IncomingRecord]] = {number: [] for number in spans}
        self._read(spans, lambda number, records: found[number].extend(filter(takes, records)), lambda: False)
        return found

    def _read(
        self,
        spans: Mapping[int, tuple[int, int]],
        receive: Callable[[int, list[IncomingRecord]], None],
        cancelled: Callable[[], bool],
    ) -> None:
        progress = OffsetProgress(f"reading {self._topic}", spans)

        def take(number: int, records: list[IncomingRecord]) -> None:
            progress.reached(number, records)
            receive(number, records)

        with contextlib.suppress(Stopped):  # enough is shown
            self._reader.read(self._topic, spans, take, stalled_after_seconds=self._seconds, cancelled=cancelled)


def _follow(settings: ClientSettings, topic: str, positions: Mapping[int, int], shown: _Shown) -> None:
    """Show what is committed from now on, until Ctrl-C, or until it is enough."""
    consumer = LogFetcher(settings, topic, FOLLOWING)
    try:
        consumer.add_all(positions)
        while not shown.is_full:
            for news in consumer.poll_batch(_PAUSE_SECONDS).values():
                for record in news.records:
                    shown.receive(record)
            sys.stdout.flush()
            for failure in consumer.take_failures().values():
                raise failure
    except KeyboardInterrupt:
        return  # how it ends
    finally:
        consumer.close()


def _named(words: list[str]) -> tuple[EventSource[Any] | None, str]:
    sources, topics = ([word for word in words if (":" in word) is named] for named in (True, False))
    if len(sources) > 1 or len(topics) > 1:
        raise typer.BadParameter("name one topic, and one source", param_hint="TOPIC")
    source = named_source(sources[0]) if sources else None
    return source, topics[0] if topics else source.config.topic if source is not None else ""


def _settings(source: EventSource[Any] | None, topic: str, servers: str) -> ClientSettings:
    config = None if source is None else source.config
    if config is not None and config.source_is_elsewhere and topic == config.topic:
        return ClientSettings(servers or config.source_bootstrap_servers, config.source_client_settings)
    return ClientSettings(brokers(servers, config), client_settings_of(config), client_id="kes-tail")


def _chosen(
    topic: str, marks: Mapping[int, Watermarks], wanted: list[int] | None, *bounds: Bound | None
) -> dict[int, Watermarks]:
    """Return the partitions to be shown. Raises ``TopicError`` for one that the topic does not have."""
    named = {bound.partition for bound in bounds if bound is not None and bound.partition is not None}
    numbers = set(wanted or ()) | named
    if named and len(numbers) > 1:
        raise typer.BadParameter("more than one partition is named", param_hint="--from")
    for number in sorted(numbers - marks.keys()):
        raise TopicError(f"topic {topic} has the partitions 0 to {len(marks) - 1}, not {number}")
    return {number: marks[number] for number in sorted(numbers or marks)}


def _offsets(
    admin: TopicAdmin, topic: str, marks: Mapping[int, Watermarks], bound: Bound | None, end: str, timeout: float
) -> dict[int, int]:
    """Return the offset of a bound in each partition, within the log (``end``: ``start`` or ``stable``)."""
    if bound is None:
        return {number: getattr(mark, end) for number, mark in marks.items()}
    if bound.offset is not None:
        found = dict.fromkeys(marks, bound.offset)
    else:
        assert bound.ms is not None  # one of the two is set
        found = admin.offsets_at(topic, bound.ms, timeout)
    past = {number: mark.stable if found[number] < 0 else found[number] for number, mark in marks.items()}
    return {number: min(max(past[number], mark.start), mark.stable) for number, mark in marks.items()}
