"""Sources of the commands of ``kes state``: the changelog, a folder, snapshots, and files that were exported."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer

from streams.cli.cluster import admin_of, config_at
from streams.cli.console import complain
from streams.cli.folders import Receive, partitions_on_disk, read_partitions
from streams.cli.state_past import Past, place_of
from streams.codecs import RESERVED_KEY_PREFIX
from streams.core.jobs import COUNTER, BrokenJob, Jobs, is_job, next_number
from streams.core.manifests import Manifest, SnapshotRefused
from streams.core.parking import PREFIX, BrokenQueue, ParkedKeys
from streams.core.timers import Timer
from streams.errors import DecodeError, OffsetError, StoreError, TopicError
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.looks.addresses import brokers
from streams.looks.records import plain, plain_bytes, plain_text
from streams.looks.scans import OffsetProgress, late_lines
from streams.records import IncomingRecord
from streams.runtime.changelog import KEPT_PREFIXES, TIMER_PREFIX, decode_timer, timer_key
from streams.runtime.keeping.folders.entries import Damaged, decode_pieces
from streams.runtime.keeping.snapshots.bundles import SnapshotStore, open_snapshots
from streams.settings.groups import StateConfig
from streams.source.event_source import EventSource
from streams.stores import Stores

JOB_NUMBERS: Final = timer_key(COUNTER)
"""The key of the number of the next durable job."""


@contextmanager
def opened(
    source: EventSource[Any],
    servers: str,
    timeout: float,
    wanted: list[int] | None,
    folder: str,
    as_of: str = "",
    about: Callable[[bytes], bool] = lambda key: True,
) -> Iterator[tuple[list[int], Callable[[Receive], None]]]:
    """The partitions, and a function that reads them: from a folder, if one is named, else from the changelog.
    ``as_of``: as they were at this place; ``about``: the keys that have to be exact."""
    if folder and as_of:
        raise typer.BadParameter("a folder has the state of now: --as-of needs the changelog", param_hint="--as-of")
    if folder:
        numbers = partitions_on_disk(source, folder, wanted)
        yield numbers, lambda receive: read_partitions(source, folder, numbers, receive)
    else:
        with _changelog(source, servers, timeout, wanted, as_of, about) as found:
            yield found


@contextmanager
def _changelog(
    source: EventSource[Any],
    servers: str,
    timeout: float,
    wanted: list[int] | None,
    as_of: str,
    about: Callable[[bytes], bool],
) -> Iterator[tuple[list[int], Callable[[Receive], None]]]:
    """The partitions, and a function that reads everything that is committed in them now, or was at a place."""
    config = source.config
    addresses, topic = brokers(servers, config), config.changelog
    settings = ClientSettings(addresses, config.client_settings, client_id="kes-state")
    with admin_of(addresses, config, timeout) as admin, closing(PartitionReader(settings)) as reader:
        if admin.identity(topic, timeout) is None:
            raise TopicError(f"{topic} does not exist: the source has not run yet, or its settings name another one")
        marks = admin.watermarks(topic, None, timeout)
        for number in set(wanted or ()) - marks.keys():
            raise TopicError(f"topic {topic} has the partitions 0 to {len(marks) - 1}, not {number}")
        spans = {number: (marks[number].start, marks[number].stable) for number in sorted(wanted or marks)}
        if as_of:
            place = place_of(as_of, config.topic)
            named = {number for _, number in place.offsets} or spans.keys()
            pasts = {number: Past(number, place, about) for number in spans if number in named}
            for number in pasts:
                if spans[number][0]:
                    raise OffsetError(f"{topic}[{number}]: records below {spans[number][0]} were deleted")
            spans = {number: spans[number] for number in pasts}
            reader.read(
                topic,
                spans,
                lambda number, records: pasts[number].receive(records),
                stalled_after_seconds=timeout,
                cancelled=lambda: False,
            )
            with GroupChecks(config_at(servers, source), seconds=timeout) as checks:
                for number, past in pasts.items():
                    past.check(f"{topic}[{number}]", partial(checks.has_holes, topic, number))
            spans = {number: (0, past.cut) for number, past in pasts.items()}

        def read(receive: Receive) -> None:
            progress = OffsetProgress(f"reading {topic}", spans)

            def take(number: int, records: list[IncomingRecord]) -> None:
                progress.reached(number, records)
                receive(number, records)

            reader.read(topic, spans, take, stalled_after_seconds=timeout, cancelled=lambda: False)

        yield list(spans), read


class StateAt(NamedTuple):
    """The state of one partition, bytes by bytes, timers and joined rows too. ``offset``: the last record of the
    changelog that is in it."""

    offset: int
    entries: dict[bytes, bytes]

    def after(self, records: list[IncomingRecord]) -> StateAt:
        """Apply records of the changelog."""
        for record in records:
            key = record.key
            if key is None or (key.startswith(RESERVED_KEY_PREFIX) and not key.startswith(KEPT_PREFIXES)):
                continue
            if record.value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = record.value
        return self._replace(offset=max(self.offset, records[-1].offset)) if records else self


class ParkedState(NamedTuple):
    """The parked keys of one partition, and its timers by name."""

    keys: ParkedKeys
    timers: dict[str, Timer]


def parked_of(number: int, entries: Mapping[bytes, bytes]) -> ParkedState:
    """Return the parked keys in a state. Raises ``OffsetError`` for one that cannot be read."""
    timers = _timers_of(number, entries)
    try:
        keys = ParkedKeys(timer for name, timer in timers.items() if name.startswith(PREFIX))
    except BrokenQueue as error:
        raise OffsetError(f"partition {number}: {error}") from error
    return ParkedState(keys, timers)


def jobs_of(number: int, entries: Mapping[bytes, bytes]) -> Jobs:
    """Return the durable jobs in a state. Raises ``OffsetError`` for one that a start would refuse."""
    try:
        return Jobs(timer for name, timer in _timers_of(number, entries).items() if is_job(name))
    except BrokenJob as error:
        raise OffsetError(f"partition {number}: {error}") from error


def next_job_of(number: int, entries: Mapping[bytes, bytes]) -> int:
    """Return the number of the next durable job in a state; 0: it has had none. Raises ``OffsetError``."""
    timer = _timers_of(number, {key: value for key, value in entries.items() if key == JOB_NUMBERS}).get(COUNTER)
    try:
        return 0 if timer is None else next_number(timer)
    except BrokenJob as error:
        raise OffsetError(f"partition {number}: {error}") from error


def _timers_of(number: int, entries: Mapping[bytes, bytes]) -> dict[str, Timer]:
    timers: dict[str, Timer] = {}
    for key, value in entries.items():
        if key.startswith(TIMER_PREFIX):
            name, timer = decode_timer(IncomingRecord("", number, 0, key, value, None))
            if timer is not None:
                timers[name] = timer
    return timers


class ExportedLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A line of an export: an entry, or at the end of a partition the ``offset`` up to which the changelog is in it.
    ``shown_key`` and ``shown_value`` are for people, and are not read."""

    partition: int
    offset: int | None = None
    key: str = ""
    value: str = ""
    shown_key: Any = None
    shown_value: Any = None


def state_of(
    source: EventSource[Any], side: str, servers: str, timeout: float, wanted: list[int] | None
) -> dict[int, StateAt]:
    """Return the state at ``side``: ``changelog``, ``changelog:PLACE`` (as it was), ``folder``, ``folder:DIR``,
    ``snapshots``, ``snapshots:ADDRESS``, or the path of an export. Raises ``StreamsError``."""
    kind, _, where = side.partition(":")
    if kind == "snapshots":
        return _from_snapshots(source, where, servers, timeout, wanted)
    if kind not in ("changelog", "folder"):
        return from_export(Path(side), wanted)
    folder = (where or folder_of(source)) if kind == "folder" else ""
    as_of = where if kind == "changelog" else ""
    found: dict[int, StateAt] = {}

    def receive(number: int, records: list[IncomingRecord]) -> None:
        found[number] = found[number].after(records)

    with opened(source, servers, timeout, wanted, folder, as_of) as (numbers, read):
        found.update({number: StateAt(-1, {}) for number in numbers})
        read(receive)
    return found


def folder_of(source: EventSource[Any]) -> str:
    """Return the folder of the settings. Raises ``StoreError`` if there is none."""
    folder = source.config.state.folder
    if not folder:
        raise StoreError("the source has no StateConfig.folder: name one (--folder DIR, or folder:DIR)")
    return folder


def topic_id_of(source: EventSource[Any], servers: str, timeout: float) -> tuple[str, int]:
    """Return topic id and number of partitions of the changelog. Raises ``TopicError``."""
    with admin_of(brokers(servers, source.config), source.config, timeout) as admin:
        found = admin.identity(source.config.changelog, timeout)
    if found is None:
        raise TopicError(f"{source.config.changelog} does not exist: the source has not run yet")
    return found[0].translate(str.maketrans("+/", "-_")), found[1]  # as Kafka's tools print it, and marks have it


def snapshots_at(
    source: EventSource[Any],
    address: str,
    wall_ms: Callable[[], int],
    pace: Callable[[int], None] = lambda size: None,
) -> SnapshotStore:
    """Open the snapshots at an address, or those of the settings; see ``open_snapshots``. Raises ``ConfigError`` and
    ``StoreError``."""
    config, state = source.config, source.config.state
    if not (address or state.snapshots):
        raise StoreError("the source has no StateConfig.snapshots: name an address")
    state = StateConfig(
        folder=state.folder or ".",
        snapshots=address or state.snapshots,
        snapshots_kept=state.snapshots_kept,
        snapshot_secret_file=state.snapshot_secret_file,
    )
    return open_snapshots(state, config.group_id, config.topic, wall_ms=wall_ms, pace=pace)


def newest(store: SnapshotStore, prefix: str) -> Manifest:
    """Return the newest snapshot that can be read, and say why others cannot. Raises ``StoreError`` if there is none,
    and ``OSError``."""
    refused: list[str] = []

    def refuse(name: str, error: SnapshotRefused) -> None:
        refused.append(f"{prefix}/{name} is not used: {error}")

    found = store.manifests(prefix, refuse)
    for text in refused:
        complain(text)
    if not found:
        raise StoreError(f"{prefix}: there is no snapshot" + (" that can be read" if refused else ""))
    return found[0][1]


def _from_snapshots(
    source: EventSource[Any], address: str, servers: str, timeout: float, wanted: list[int] | None
) -> dict[int, StateAt]:
    store = snapshots_at(source, address, lambda: 0)
    topic_id, partitions = topic_id_of(source, servers, timeout)
    found: dict[int, StateAt] = {}
    for number in sorted(set(wanted)) if wanted else range(partitions):
        prefix = store.prefix(topic_id, number)
        report = late_lines("bytes")
        try:
            manifest = newest(store, prefix)
            entries: dict[bytes, bytes] = {}
            pieces = store.pieces(manifest, partial(report, f"reading {prefix}"))
            for changes in decode_pieces(pieces, "its data"):
                for change in changes:
                    if change.value is None:
                        entries.pop(change.key, None)
                    else:
                        entries[change.key] = change.value
        except (SnapshotRefused, Damaged, OSError) as error:
            raise StoreError(f"{prefix}: {error}") from error
        found[number] = StateAt(manifest.mark.offset, entries)
    return found


def from_export(path: Path, wanted: list[int] | None) -> dict[int, StateAt]:
    """Return what is in a file of ``kes state export``. Raises ``StoreError`` for a file that is not one, or is cut."""
    found: dict[int, StateAt] = {}
    ended: set[int] = set()
    line_number = 0
    try:
        with open(path, "rb") as file:
            for text in file:
                line_number += 1
                line = msgspec.json.decode(text, type=ExportedLine)
                state = found.setdefault(line.partition, StateAt(-1, {}))
                if line.offset is not None:
                    found[line.partition] = state._replace(offset=line.offset)
                    ended.add(line.partition)
                else:
                    key, value = (base64.b64decode(text, validate=True) for text in (line.key, line.value))
                    state.entries[key] = value
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror or error}; a side is changelog, folder, snapshots, or a file"
        ) from error
    except (msgspec.DecodeError, binascii.Error) as error:
        raise StoreError(f"{path}: line {line_number} is not from an export: {error}") from error
    for number in found.keys() - ended:
        raise StoreError(f"{path}: the line that ends partition {number} is missing: the file is cut off")
    return {number: state for number, state in found.items() if not wanted or number in wanted}


def read_on(
    source: EventSource[Any], sides: list[dict[int, StateAt]], servers: str, timeout: float
) -> list[dict[int, StateAt]]:
    """Bring states to the same end: that of the changelog now. Raises ``StreamsError``."""
    config = source.config
    addresses, topic = brokers(servers, config), config.changelog
    settings = ClientSettings(addresses, config.client_settings, client_id="kes-state")
    with admin_of(addresses, config, timeout) as admin, closing(PartitionReader(settings)) as reader:
        marks = admin.watermarks(topic, None, timeout)
        return [_on(side, topic, marks, reader, timeout) for side in sides]


def _on(
    side: dict[int, StateAt], topic: str, marks: Mapping[int, Any], reader: PartitionReader, timeout: float
) -> dict[int, StateAt]:
    found = dict(side)
    spans = {number: (state.offset + 1, marks[number].stable) for number, state in side.items() if number in marks}
    progress = OffsetProgress(f"reading {topic}", spans)

    def receive(number: int, records: list[IncomingRecord]) -> None:
        progress.reached(number, records)
        found[number] = found[number].after(records)

    reader.read(topic, spans, receive, stalled_after_seconds=timeout, cancelled=lambda: False)
    return found


TableName = Annotated[
    str, typer.Option("--table", metavar="NAME", help="Only this structure of a Stores; keys without its name.")
]


def shown_by(store: Any, table: str) -> tuple[Any, Callable[[bytes], bool]]:
    """Return what decodes the entries that are shown, all of a store or one structure of it, and a check for the keys
    of its entries. Raises ``BadParameter``."""
    if not table:
        return store, lambda key: not key.startswith(RESERVED_KEY_PREFIX)
    if not isinstance(store, Stores):
        raise typer.BadParameter(
            f"--table: the store is no Stores but {type(store).__name__}, which has one table only"
        )
    try:
        part = store.part_named(table)[1]
    except StoreError as error:
        raise typer.BadParameter(f"--table: {error}") from None
    return part, lambda key: store.is_of(key, table)


def decoded(store: Any, method: str, data: bytes) -> tuple[Any, str]:
    """Return what the bytes are to the store, as plain data, and why it cannot read them. Stores of the user's keep
    bytes that only they understand."""
    problem = ""
    if (decode := getattr(store, method, None)) is not None:
        try:
            return plain(decode(data)), ""
        except DecodeError as error:
            problem = str(error)
    return plain_text(data) if method == "decode_key" else plain_bytes(data), problem


def decoded_entry(store: Any, key: bytes, data: bytes) -> tuple[Any, str]:
    """Return the value as ``decoded``; by its key where several structures have one store."""
    if (decode := getattr(store, "decode_entry", None)) is None:
        return decoded(store, "decode_value", data)
    try:
        return plain(decode(key, data)), ""
    except DecodeError as error:
        return plain_bytes(data), str(error)


def unreadable(store: Any, key: bytes, value: bytes) -> tuple[Any, str]:
    """Return a key as plain data, and why the store cannot read its entry; empty: it can, or the entry is not the
    store's."""
    if key.startswith(RESERVED_KEY_PREFIX) or (isinstance(store, Stores) and store.is_carried(key)):
        return None, ""
    name, problem = decoded(store, "decode_key", key)
    return name, problem or decoded_entry(store, key, value)[1]
