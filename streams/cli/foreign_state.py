"""State of another program, as it comes along with its offsets: ``kes offsets start --from-group OLD --state ...``.

Rows and offsets must be one cut: the rows are what the records below the offsets have made, and nothing of those
behind. That is proven where the program wrote both in transactions: the last batch of each changelog partition is one
of a transaction, nothing was deleted from its log, and the source begins at that group's offsets. Without the proof the
user has to say that the program was stopped in order (``--stopped-cleanly``), and the begin record keeps that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from importlib import import_module
from itertools import islice
from typing import Any, Final, NamedTuple

import typer

from streams.cli.start_places import At
from streams.cli.state_sources import decoded, decoded_entry
from streams.cli.state_writing import check_sizes, chunks, store_of
from streams.errors import ConfigError, DecodeError, OffsetError, StoreError, TopicError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.looks.records import one_line, shortened
from streams.looks.scans import late_lines
from streams.model.loading import described
from streams.model.partitioners import partition_of
from streams.model.topics import missing
from streams.records import IncomingRecord, Output, TopicPartition, shown_key
from streams.runtime.ownership.replicas import make_store
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource
from streams.stores.foreign import FORMATS, ForeignFormat, ForeignRow, processed
from streams.stores.journalled import JournalledBytes

Take = Callable[[Any, ForeignRow], None]
"""The user's function: puts a row into the store of its partition."""

_PLACED: Final = 100
"""Rows of each partition whose partition is checked: a partitioner is right for all keys or for few."""
_SAMPLES: Final = 3
_LONGEST: Final = 160
_MOST_NAMED: Final = 3


class ForeignChangelog(NamedTuple):
    """One ``--state``: its text, and what it names."""

    text: str
    topic: str
    format: ForeignFormat


class StateRequest(NamedTuple):
    """State as it is requested. ``stopped_cleanly``: the user's word in place of a proof. ``keep_unplaced``: rows stay
    in their partition, whatever their keys say."""

    changelogs: tuple[ForeignChangelog, ...]
    take: Take
    stopped_cleanly: bool
    keep_unplaced: bool


def state_request_of(
    texts: list[str], rows: str, from_group: str, *, stopped_cleanly: bool, keep_unplaced: bool
) -> StateRequest | None:
    """Check what is requested; ``None``: no state. Raises ``BadParameter``, ``ConfigError``."""
    if not texts:
        if rows or stopped_cleanly or keep_unplaced:
            raise typer.BadParameter("--rows, --stopped-cleanly and --keep-unplaced need --state")
        return None
    if not from_group:
        raise typer.BadParameter("--state needs --from-group: its rows belong to the offsets of that group")
    if not rows:
        raise typer.BadParameter(
            "--state needs --rows MODULE:FUNCTION, which puts a row into the store: bytes of other serializers could "
            "be read as other values",
            param_hint="--rows",
        )
    found: list[ForeignChangelog] = []
    for text in texts:
        name, _, topic = text.partition(":")
        if name not in FORMATS or not topic:
            raise typer.BadParameter(
                f"{text!r} is not FORMAT:TOPIC; formats are {', '.join(FORMATS)}", param_hint="--state"
            )
        if any(one.topic == topic for one in found):
            raise typer.BadParameter(f"{topic} is named twice", param_hint="--state")
        found.append(ForeignChangelog(text, topic, FORMATS[name]))
    return StateRequest(tuple(found), _function(rows), stopped_cleanly, keep_unplaced)


def _function(text: str) -> Take:
    module, _, name = text.partition(":")
    try:
        found: Any = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"cannot load --rows {text!r}: {described(error)}") from error
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ConfigError(f"--rows {text!r} is no plain function of a store and a row")
    return found  # type: ignore[no-any-return]


class ForeignState:
    """The rows of one run of the command. ``taken``: those that the store has taken, by partition; ``samples``: some of
    them, as the store has them. ``exact``: it is proven that rows and offsets are one cut."""

    def __init__(
        self,
        request: StateRequest,
        source: EventSource[Any],
        config: EventSourceConfig,
        checks: GroupChecks,
        admin: TopicAdmin,
        timeout: float,
    ) -> None:
        """``admin``: for the cluster of the group. Raises ``StoreError`` for a store that keeps no bytes."""
        self._request, self._source, self._config = request, source, config
        self._checks, self._admin, self._timeout = checks, admin, timeout
        self._spans: dict[str, dict[int, tuple[int, int]]] = {}
        self.taken: dict[int, int] = {}
        self.samples: list[str] = []
        self.exact = True
        store_of(source).revoked()

    def check(self, group: str, places: At) -> None:
        """Look at the changelogs as they are now, with the group at rest. Raises ``OffsetError`` where rows and offsets
        may not be one cut, ``TopicError``."""
        doubts: list[str] = []
        held: set[int] = set()  # partitions that have rows
        for one in self._request.changelogs:
            if self._admin.identity(one.topic, self._timeout) is None:
                raise TopicError(missing(one.topic))
            marks = self._admin.watermarks(one.topic, None, self._timeout)
            if len(marks) != self._config.num_partitions:
                raise TopicError(
                    f"{one.topic} has {len(marks)} partitions, the source has {self._config.num_partitions}: its rows "
                    "are not where the source would look for them"
                )
            # Up to the high watermark: what a transaction has not decided is waited for.
            spans = self._spans[one.topic] = {number: (mark.start, mark.end) for number, mark in marks.items()}
            ends = {number: end for number, (start, end) in spans.items() if start < end}
            if not ends:
                raise OffsetError(f"{one.topic} is empty: to begin with an empty state leave out --state {one.text}")
            held |= ends.keys()
            if not one.topic.startswith(one.format.names.format(group=group)):
                doubts.append(f"{one.topic} is not named as a changelog of {group}")
            for number, (start, _) in spans.items():
                if start and not one.format.is_cut:
                    doubts.append(f"{one.topic}[{number}]: records below {start} were deleted")
            decided = self._checks.end_transactional(one.topic, ends)
            doubts += [
                f"{one.topic}[{number}]: its end was not written in a transaction, as exactly once does it"
                for number in ends
                if not decided.get(number)
            ]
        for topic, found in places.items():
            for number, (_, text) in found.items():
                if number in held and text != f"group {group}":
                    doubts.append(f"{topic}[{number}] has rows, and begins at {text}, not where the group stands")
        self.exact = not doubts
        if doubts and not self._request.stopped_cleanly:
            more = f"; and {len(doubts) - _MOST_NAMED} more" if len(doubts) > _MOST_NAMED else ""
            raise OffsetError(
                f"it is not proven that rows and offsets belong together: {'; '.join(doubts[:_MOST_NAMED])}{more}. If "
                "the program commits its offsets when it stops, and was stopped in order, say --stopped-cleanly; else "
                "let the source read the topic from its start"
            )

    def read(self, places: At) -> None:
        """Read the changelogs as ``partitions`` does, for what is known then."""
        for _ in self.partitions(places):
            pass

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the changelogs as they are named."""
        return tuple(one.text for one in self._request.changelogs)

    def facts(self) -> dict[str, Any]:
        """Return what came along, as data."""
        return {"from": self.texts, "rows": self.taken, "exact": self.exact, "samples": self.samples}

    @property
    def shown(self) -> str:
        """Return it for people."""
        lines = [f"{sum(self.taken.values()):,} rows come along, of {', '.join(self.texts)}, such as"]
        return "\n  ".join([*lines, *self.samples]) if self.samples else "no rows come along: there are only deletions"

    def partitions(self, places: At) -> Iterator[tuple[int, list[Output]]]:
        """Read the changelogs, one partition after the other, and return the rows as the source's own changelog has
        them. ``check`` comes before. Raises ``StoreError`` for the first row that cannot be taken, ``OffsetError`` for
        one that does not belong to the offsets."""
        settings = ClientSettings(self._config.bootstrap_servers, self._config.client_settings, client_id="kes-start")
        report = late_lines("partitions")
        self.samples.clear()
        with closing(PartitionReader(settings)) as reader:
            for number in range(self._config.num_partitions):
                store = make_store(self._source.program().store_factory, TopicPartition(self._config.topic, number))
                for one in self._request.changelogs:
                    offsets = {topic: found[number][0] for topic, found in places.items()}
                    self._take(one, number, store, offsets, reader)
                entries = dict(store.dump())
                self._check(store, number, entries)
                store.revoked()
                self.taken[number] = len(entries)
                report("adopting state", number + 1, self._config.num_partitions)
                for some in chunks(self._config.changelog, number, entries):
                    yield number, some

    def _take(
        self,
        changelog: ForeignChangelog,
        number: int,
        store: JournalledBytes,
        offsets: Mapping[str, int],
        reader: PartitionReader,
    ) -> None:
        """Put the rows of one partition of a changelog into the store."""
        last: dict[bytes, IncomingRecord] = {}
        span, report = self._spans[changelog.topic][number], late_lines("records")

        def receive(_: int, records: list[IncomingRecord]) -> None:
            for record in records:
                if record.key is None:
                    raise StoreError(f"{record.where}: it has no key, so it is no row of a changelog")
                last[record.key] = record
            report(f"reading {changelog.topic}[{number}]", records[-1].offset + 1 - span[0], span[1] - span[0])

        reader.read(
            changelog.topic, {number: span}, receive, stalled_after_seconds=self._timeout, cancelled=lambda: False
        )
        checked = 0
        journal: list[Any] = []
        store.begin(journal)
        for record in last.values():
            try:
                self._refuse_later(record, offsets)
                row = None if record.value is None else changelog.format.row(record)
            except DecodeError as error:
                raise StoreError(f"{record.where}: {error}; is --state {changelog.text} its format?") from error
            if row is None:
                continue
            if checked < _PLACED and not self._request.keep_unplaced:
                checked += 1
                self._refuse_misplaced(changelog, row)
            try:
                answer = self._request.take(store, row)
            except Exception as error:
                raise StoreError(f"{record.where}, key {shown_key(row.key)}: {described(error)}") from error
            if answer is not None:
                raise StoreError(
                    f"{record.where}: --rows returned {type(answer).__name__}; it puts a row into the store, and "
                    "returns nothing"
                )
            journal.clear()
        store.end()

    def _refuse_later(self, record: IncomingRecord, offsets: Mapping[str, int]) -> None:
        for topic, offset in processed(record).items():
            if offset >= offsets.get(topic, offset + 1):
                raise OffsetError(
                    f"{record.where}: it was written for {topic}[{record.partition}]@{offset}, and the group stands at "
                    f"{offsets[topic]}: the program was killed in between, and what the row was before is lost. Start "
                    "it again, let it commit, and stop it in order"
                )

    def _refuse_misplaced(self, changelog: ForeignChangelog, row: ForeignRow) -> None:
        key = changelog.format.record_key(row.key)
        due = row.partition if key is None else partition_of(key, self._config.num_partitions)
        if due != row.partition:
            raise OffsetError(
                f"{row.topic}[{row.partition}]@{row.offset}: the key {shown_key(key)} belongs to partition {due} of "
                f"{self._config.num_partitions} (murmur2), where its events would not find this row. Behind a "
                "repartition topic make that one the source's topic; if producers place keys in another way, say "
                "--keep-unplaced"
            )

    def _check(self, store: JournalledBytes, number: int, entries: Mapping[bytes, bytes]) -> None:
        """Raise ``StoreError`` for an entry that is too large for a changelog, and note some of the others."""
        check_sizes(entries, number, self._source.program().message_limit)
        for key, value in islice(entries.items(), _SAMPLES - len(self.samples)):
            name, found = decoded(store, "decode_key", key)[0], decoded_entry(store, key, value)[0]
            self.samples.append(shortened(f"{one_line(name)}: {one_line(found)}", _LONGEST))
