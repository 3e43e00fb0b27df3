"""The toolkit's own records in a changelog, beside the changes of the store (protocol, sections 6 and 8).

Keys of these records begin with ``RESERVED_KEY_PREFIX``, so they are never taken for a change, and compaction keeps the
last one of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import ge
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from streams.codecs import RESERVED_KEY_PREFIX
from streams.core import cron, jobs, parking
from streams.core.timers import Timer
from streams.errors import OffsetError
from streams.model.tracing import Carrier
from streams.records import IncomingRecord, shown_key

OFFSET_KEY = RESERVED_KEY_PREFIX + b"offset"
"""Key of the one record per changelog partition and transaction that carries the input offset (protocol, section 6)."""
RELEASE_KEY = RESERVED_KEY_PREFIX + b"release"
"""Key of the release marker, the last record of a partition's last transaction on its donor (protocol, section 8)."""
BEGIN_KEY = RESERVED_KEY_PREFIX + b"begin"
"""Key of the record that says how a partition's state began (``BeginRecord``). It goes where the state goes."""
RESET_KEY = RESERVED_KEY_PREFIX + b"reset"
"""Key of the record that says how a partition was reset last (``ResetRecord``). It goes where the state goes."""
GROWTH_KEY = RESERVED_KEY_PREFIX + b"growth"
"""Key of the record that says that a partition's state is placed by a larger number of partitions (``GrowthRecord``).
Each partition has it in the transaction that has moved the state."""
TIMER_PREFIX = RESERVED_KEY_PREFIX + b"timer."
"""Key of a timer: this, and the timer's name in UTF-8. Its value is a ``TimerRecord``; a tombstone removes it."""
PARKED_PREFIX = TIMER_PREFIX + parking.PREFIX.encode()
"""Key of a parked key's queue: this, and 32 hexadecimal digits. Keys of the events in it: a slash and 8 more digits
behind that; of the further pieces of a large event: a dot and 8 more."""
PARKED_EVENT_LENGTH = len(PARKED_PREFIX) + 32 + 1 + 8
"""Bytes of the key of an event's first piece."""
JOIN_PREFIX = RESERVED_KEY_PREFIX + b"join."
"""Key of a joined table's row: this, the table's topic, a zero byte, and the row's key. The key without zero byte has
the end up to which the table is to be read before any event, in decimal digits; a tombstone: it is read."""
SEEN_PREFIX = RESERVED_KEY_PREFIX + b"seen."
"""Key of an id that was handled (``once=``): this, and the 16 bytes of its digest. Its value is that of
``core.seen.encode``; a tombstone forgets it."""
KEPT_PREFIXES = (BEGIN_KEY, RESET_KEY, TIMER_PREFIX, JOIN_PREFIX, SEEN_PREFIX)
"""Keys of the toolkit that are part of a partition's state: folders, snapshots and exports have them."""
LOOKUP_PREFIX = "lookup:"
"""Among the inputs of an offset record: this, and the topic of a lookup, name a ``LookupPosition``. No topic's name has
a colon."""
TIMER_FORMAT = 1
"""The newest layout of ``TimerRecord`` that this version can read."""
BEGIN_FORMAT = 1
"""The layout of begin, reset and growth records that this version writes, and the newest that it can read."""


InputPosition: TypeAlias = tuple[int, str]
"""The next offset to read in an input, and the id of its topic."""

T = TypeVar("T")


class TopicIds(NamedTuple):
    """The topics that a partition's state belongs to, by their ids. Empty: not known."""

    source: str = ""
    changelog: str = ""


class LookupPosition(msgspec.Struct, frozen=True, array_like=True):
    """The place in a lookup that handlers have not looked into beyond: the id of its topic, and by the number of its
    partitions the first offset that they cannot have seen. ``writer``: that of the offset record for which it was
    written. In a later one, of a member that does not know the lookup, it is only carried: a member between the two may
    have looked further without a record, and died."""

    # The record is an array: the order of the fields is the format.
    topic_id: str
    offsets: tuple[int, ...]
    writer: str = ""


class OffsetRecord(msgspec.Struct, frozen=True):
    """The input offset in the changelog: ``offset`` is the next one to read. ``writer`` and ``serial`` name the
    transaction, ``generation`` the group's at the time of sealing. ``source_id`` and ``changelog_id`` are the topic ids
    that were checked when the partition was taken over; records of older versions lack them.

    ``inputs``: positions in further inputs, ``{topic: {partition: [offset, topic id]}}``, all of them in each record;
    left out by a source that reads one topic. Those of inputs that are not declared here are carried on as they are: so
    an input can be added member by member, taken away, and put back. The positions of lookups are beside them, under
    names that no topic has (``LOOKUP_PREFIX``), and so are carried in the same way.
    """

    offset: int
    writer: str
    serial: int
    generation: int
    # The fields from here on have defaults: records of older versions lack them.
    source_id: str = ""
    changelog_id: str = ""
    # The positions stay encoded: those that mean nothing here are carried on unchanged.
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def ids(self) -> TopicIds:
        return TopicIds(self.source_id, self.changelog_id)

    def input_ids(self, further: Sequence[str], partition: int) -> tuple[str, ...]:
        """Return the topic ids of these further inputs; empty: not known."""
        found = [self.position_in(topic, partition) for topic in further]
        return tuple("" if at is None else at[1] for at in found)

    def position_in(self, topic: str, partition: int) -> InputPosition | None:
        """Return offset and topic id of a further input; ``None``: it was never one. Raises ``OffsetError``."""
        what = f"of partition {partition} has a position of {topic}"
        found = self._decoded(topic, dict[str, InputPosition], what)
        return None if found is None else found.get(str(partition))

    def position_of_lookup(self, topic: str) -> LookupPosition | None:
        """Return how far handlers have looked into a lookup; ``None``: it was never one. Raises ``OffsetError``."""
        return self._decoded(f"{LOOKUP_PREFIX}{topic}", LookupPosition, f"has a position of the lookup {topic}")

    def _decoded(self, name: str, kind: type[T], what: str) -> T | None:
        """Return what ``inputs`` has under a name. Raises ``OffsetError``."""
        if self.inputs is msgspec.UNSET:
            return None
        try:
            # Only this entry is decoded in full: others may be of a newer version, in a form that is not known here.
            found = msgspec.json.decode(self.inputs, type=dict[str, msgspec.Raw]).get(name)
            return None if found is None else msgspec.json.decode(found, type=kind)
        except msgspec.DecodeError as error:
            raise OffsetError(
                f"the offset record {what} that cannot be read ({error}): a newer version of this package wrote it, or "
                "something else did"
            ) from error

    def has_all(self, further: Sequence[str], partition: int) -> bool:
        """Check for a record with the position of each of these inputs."""
        return all(self.position_in(topic, partition) is not None for topic in further)

    def reaches(self, offsets: Sequence[int], further: Sequence[str], partition: int) -> bool:
        """Check for a record at these offsets, or behind them, in every input."""
        found = [self.position_in(topic, partition) for topic in further]
        return all(map(ge, (self.offset, *(-1 if at is None else at[0] for at in found)), offsets))


def further_positions(
    known: OffsetRecord | None, partition: int, positions: Mapping[str, InputPosition]
) -> msgspec.Raw:
    """Encode the positions in these further inputs, beside those that the record names of others, as they are."""
    carried: dict[str, msgspec.Raw] = {}
    if known is not None and known.inputs is not msgspec.UNSET:
        carried = msgspec.json.decode(known.inputs, type=dict[str, msgspec.Raw])
    # The numbers of partitions are text, because JSON has no other keys.
    mine = {topic: {str(partition): position} for topic, position in positions.items()}
    return msgspec.Raw(msgspec.json.encode(carried | mine))


def without_input(known: OffsetRecord, topic: str) -> msgspec.Raw | msgspec.UnsetType:
    """Encode the positions in further inputs that the record names, without those in this one."""
    if known.inputs is msgspec.UNSET:
        return msgspec.UNSET
    by_topic = msgspec.json.decode(known.inputs, type=dict[str, msgspec.Raw])
    by_topic.pop(topic, None)
    return msgspec.Raw(msgspec.json.encode(by_topic)) if by_topic else msgspec.UNSET


class ReleaseMarker(msgspec.Struct, frozen=True):
    """The donor's last record: the partition goes to the member ``to`` (a member id), as ordered in ``generation``."""

    # This is the id of the member, not the name of its instance. Generations begin again when a coordinator has lost
    # its memory. Then an old marker would start another member of that name.
    to: str
    generation: int


class TimerRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A timer in the changelog, as JSON (``value`` and ``key`` in base64): see ``core.timers.Timer``."""

    v: int
    due_ms: int
    type: str
    version: int
    value: bytes
    key: bytes | None
    trace: Carrier = ()
    by: int = 0


class BeginRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Beginning of a partition's state, where that was decided on purpose. ``how``: ``start``, or ``adopt`` (at the
    offsets of another program). ``at``: the first offset, by input; ``places``: the text that it was decided by. ``by``
    and ``at_ms``: who wrote it, and when. ``group``: the one whose offsets were taken. ``state``: the changelogs whose
    rows came along; ``exact``: it is proven that they and the offsets belong together, and not only the user's word.
    """

    v: int = BEGIN_FORMAT
    how: str
    at: dict[str, int]
    places: dict[str, str]
    by: str
    at_ms: int
    group: str = ""
    # Records of older versions lack the fields from here on.
    state: tuple[str, ...] = ()
    exact: bool = True

    @property
    def shown(self) -> str:
        """Return it for people."""
        found = ", ".join(f"{topic} at {offset} ({self.places.get(topic, '-')})" for topic, offset in self.at.items())
        state = f", with the rows of {', '.join(self.state)}" if self.state else ""
        return f"{self.how}: {found}{state}{'' if self.exact else ' (on the word that it stopped cleanly)'}"


class ResetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Reset of a partition. ``was`` and ``at``: its offsets before and after, by input; ``places``: as in
    ``BeginRecord``. ``kept_state``: its entries stayed. ``by``: the ``writer`` of the offset record that was written
    with it. ``backup``: the file with its state before, and ``end``, how far of the changelog that is."""

    v: int = BEGIN_FORMAT
    was: dict[str, int]
    at: dict[str, int]
    places: dict[str, str]
    kept_state: bool
    by: str
    at_ms: int
    backup: str
    end: int

    @property
    def shown(self) -> str:
        """Return it for people."""
        found = ", ".join(f"{topic} from {self.was.get(topic, 0)} to {at}" for topic, at in self.at.items())
        return f"reset: {found}{', with its state' if self.kept_state else ''}"


class GrowthRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Growth of a source from ``before`` partitions to ``after``. ``by``: the ``writer`` of the offset record that was
    written with it. ``entries``: how many have come to this partition, and ``left``, how many have gone."""

    v: int = BEGIN_FORMAT
    before: int
    after: int
    by: str
    at_ms: int
    entries: int
    left: int

    @property
    def shown(self) -> str:
        """Return it for people."""
        return f"grown from {self.before} to {self.after} partitions: {self.entries:,} came, {self.left:,} went"


def beginning(
    began: BeginRecord, partition: int, ids: Mapping[str, str], changelog_id: str
) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
    """Return keys and values of the records of a partition that begins: its begin record, and the offset record.
    ``ids``: those of the inputs. The first input of the begin record is the source's own topic."""
    (own, offset), *further = began.at.items()
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    if further:
        inputs = further_positions(None, partition, {topic: (at, ids[topic]) for topic, at in further})
    position = OffsetRecord(offset, began.by, 0, 0, ids[own], changelog_id, inputs)
    return (BEGIN_KEY, msgspec.json.encode(began)), (OFFSET_KEY, msgspec.json.encode(position))


def decode_offset(record: IncomingRecord) -> OffsetRecord:
    """Decode the offset record in this changelog record. Raises ``OffsetError`` if it is not one."""
    return _decode(record, OffsetRecord, "offset record")


def decode_begin(record: IncomingRecord) -> BeginRecord:
    """Decode the begin record in this changelog record. Raises ``OffsetError`` if it is not one, or a newer one."""
    return _decode_known(record, BeginRecord, "begin record")


def decode_reset(record: IncomingRecord) -> ResetRecord:
    """Decode the reset record in this changelog record. Raises ``OffsetError`` if it is not one, or a newer one."""
    return _decode_known(record, ResetRecord, "reset record")


def decode_growth(record: IncomingRecord) -> GrowthRecord:
    """Decode the growth record in this changelog record. Raises ``OffsetError`` if it is not one, or a newer one."""
    return _decode_known(record, GrowthRecord, "growth record")


def decode_release(record: IncomingRecord) -> ReleaseMarker:
    """Decode the release marker in this changelog record. Raises ``OffsetError`` if it is not one."""
    return _decode(record, ReleaseMarker, "release marker")


def timer_key(name: str) -> bytes:
    """Return the key of the timer with this name. Raises ``UnicodeEncodeError`` for lone surrogates."""
    return TIMER_PREFIX + name.encode()


def encode_timer(timer: Timer) -> bytes:
    """Encode the value of a timer's record."""
    if parking.is_piece(timer.name):
        return timer.value  # as it is: large events would grow by a third as text
    return msgspec.json.encode(
        TimerRecord(
            _format(timer.name),
            parking.NEVER_MS if cron.is_cron(timer.name) else timer.due_ms,
            timer.type,
            timer.version,
            timer.kept,
            timer.key,
            timer.trace,
            timer.by,
        )
    )


def _format(name: str) -> int:
    # Other releases are to refuse a queue: they would handle later events of its key as if it were not there. And a
    # job: it would not run as long as they have its partition.
    return parking.FORMAT if parking.is_parked(name) else jobs.FORMAT if jobs.is_job(name) else TIMER_FORMAT


def decode_timer(record: IncomingRecord) -> tuple[str, Timer | None]:
    """Decode (name, timer) of the changelog record of a timer, or of a parked key; ``None``: it is removed. Raises
    ``OffsetError`` for an unreadable record."""
    try:
        name = (record.key or b"")[len(TIMER_PREFIX) :].decode()
    except UnicodeDecodeError as error:
        raise _unreadable(record, "timer", error) from error
    if record.value is None:
        return name, None
    if parking.is_piece(name):
        return name, Timer(name, parking.NEVER_MS, parking.EVENT_TYPE, record.value)
    found = _decode(record, TimerRecord, "timer")
    newest = _format(name)
    # A newer format is refused, and not passed over: a timer that is not read never fires.
    if found.v > newest:
        raise _unreadable(record, "timer", f"its format is {found.v}, the newest known here is {newest}")
    timer = Timer(name, found.due_ms, found.type, found.value, found.version, found.key, found.trace, found.by)
    return name, cron.restored(timer) if cron.is_cron(name) else timer


B = TypeVar("B", BeginRecord, ResetRecord, GrowthRecord)


def _decode_known(record: IncomingRecord, kind: type[B], name: str) -> B:
    found = _decode(record, kind, name)
    if found.v > BEGIN_FORMAT:
        raise _unreadable(record, name, f"its format is {found.v}, the newest known here is {BEGIN_FORMAT}")
    return found


def _decode(record: IncomingRecord, kind: type[T], name: str) -> T:
    try:
        return msgspec.json.decode(record.value or b"", type=kind)
    except msgspec.DecodeError as error:
        raise _unreadable(record, name, error) from error


def _unreadable(record: IncomingRecord, name: str, error: object) -> OffsetError:
    key = record.key or b""
    of = f" {shown_key(key.removeprefix(TIMER_PREFIX))}" if key.startswith(TIMER_PREFIX) else ""
    return OffsetError(
        f"{record.where}: the {name}{of} cannot be read ({error}): something else writes to the changelog, or a newer "
        "version of this package does"
    )
