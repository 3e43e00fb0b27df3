"""Parked keys of one partition: events that could not be handled, and the later ones of their keys, in queues.

A queue is kept where timers are, so whatever carries timers carries it. It has one record of its own, with its numbers
and the time of the next attempt, and one record or more for each event in it. Nothing here is changed but by ``apply``,
with the changes of an event that is complete: the queues in memory are always those of the admitted events.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from streams.core.origin import Origin, parked_origin
from streams.core.timers import Timer
from streams.settings.groups import ParkingConfig

PREFIX: Final = "@park/"
"""The name of a queue's record: this, and 32 hex digits. Records of its events: that name, a slash, and the number."""
QUEUE_TYPE: Final = "kes.parked"
EVENT_TYPE: Final = "kes.parked.event"
FORMAT: Final = 2
"""The format of these records. Releases that know none but 1 refuse the partition: they would break its keys' order."""
NEVER_MS: Final = 253_402_300_799_999
"""The end of the year 9999: a head that is not tried again by time."""
LONGEST_PIECE: Final = 512 * 1024
"""Bytes of an event in one record of the changelog, at most."""
LONGEST_ERROR: Final = 300
"""Letters of the error that a queue's record keeps."""
_RECORD: Final = 0
_TIMER: Final = 1
_RESULT: Final = 2
_UPDATE: Final = 3


class BrokenQueue(ValueError):
    """The records of a queue do not belong together, or cannot be read."""


class Queued(msgspec.Struct, frozen=True, array_like=True):
    """An event in a queue. ``kind`` 0: an input record; 1: a timer by reference: ``topic`` is its name, and
    ``timestamp_ms`` its due time; 2: the end of a job (``core.jobs.JobEnd``), whose definition ``topic`` names, and
    whose id is the only header; 3: the record of a joined table, whose row is changed: ``old`` is the row before."""

    # The record is an array: the order of the fields is the format.
    v: int
    kind: int
    topic: str
    offset: int
    timestamp_ms: int
    headers: tuple[tuple[str, bytes | None], ...] | None
    key: bytes | None
    value: bytes | None
    old: bytes | None = None

    @classmethod
    def of_timer(cls, timer: Timer) -> Queued:
        """Refer to a timer, which stays set."""
        return cls(FORMAT, _TIMER, timer.name, -1, timer.due_ms, None, timer.key, None)

    @classmethod
    def of_result(cls, jobs: str, job_id: str, since_ms: int, key: bytes | None, value: bytes) -> Queued:
        """Make the entry of a job's end. Its record is gone, so the entry has all of it."""
        return cls(FORMAT, _RESULT, jobs, -1, since_ms, (("kes-job-id", job_id.encode()),), key, value)

    @property
    def is_result(self) -> bool:
        return self.kind == _RESULT

    @property
    def is_timer(self) -> bool:
        return self.kind == _TIMER

    @property
    def is_update(self) -> bool:
        return self.kind == _UPDATE

    def with_old(self, old: bytes | None) -> Queued:
        """Return the record of a joined table's row, which was ``old`` before."""
        return msgspec.structs.replace(self, kind=_UPDATE, old=old)

    @property
    def queue_name(self) -> str:
        """Return the name of the queue that it belongs into. Without a key it has one of its own."""
        if self.key is not None:
            return queue_name(self.key)
        return PREFIX + hashlib.blake2b(self.place.encode(), digest_size=16, person=b"null").hexdigest()

    def first_number(self, now_ms: int) -> int:
        """Return its number as the first event of a new queue: another one than in an earlier queue of its key, so an
        operator's request that comes late meets no other event under the number that it names."""
        digest = hashlib.blake2b(f"{self.place} {now_ms}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 2  # far from the last number of eight digits

    @property
    def place(self) -> str:
        """Return what names it among all events of its partition."""
        if self.is_result:
            return f"job {self.headers}"
        return f"timer {self.topic}@{self.timestamp_ms}" if self.is_timer else f"{self.topic}@{self.offset}"


def queued_record(
    topic: str,
    offset: int,
    timestamp_ms: int,
    headers: Iterable[tuple[str, bytes | None]] | None,
    key: bytes | None,
    value: bytes | None,
) -> Queued:
    """Make the entry of an input record."""
    return Queued(FORMAT, _RECORD, topic, offset, timestamp_ms, None if headers is None else tuple(headers), key, value)


def queue_name(key: bytes) -> str:
    """Return the name of a key's queue. Keys are compared as bytes."""
    return PREFIX + hashlib.blake2b(key, digest_size=16).hexdigest()


class QueueState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The numbers of a queue: that of its ``head``, and the one behind its last event. ``attempts`` at the head have
    failed, the first one at ``first_ms``, the last one with ``error`` in ``handler``. ``owner``: the process that has
    written it; ``noted``: the one that was going to try the head."""

    head: int
    next: int
    bytes: int
    since_ms: int
    attempts: int = 0
    first_ms: int = 0
    error: str = ""
    handler: str = ""
    owner: str = ""
    noted: str = ""


class QueueRecord(Timer, frozen=True, kw_only=True):
    """The record of a queue, as a timer that is due when its head is to be tried."""

    state: QueueState

    @classmethod
    def of(cls, name: str, due_ms: int, state: QueueState) -> QueueRecord:
        """Make the record."""
        return cls(name, max(0, min(due_ms, NEVER_MS)), QUEUE_TYPE, _encode_state(state), state=state)


class PieceRecord(Timer, frozen=True, kw_only=True):
    """A record with an event of a queue, or with a piece of it. ``queued``: in the first one."""

    queued: Queued | None


class Queue:
    """One queue. ``record``: its own; ``events``: by their numbers; ``pieces``: the bytes of the records of each."""

    __slots__ = ("events", "key", "name", "pieces", "record")

    def __init__(self, record: QueueRecord) -> None:
        self.name = record.name
        self.record = record
        self.key: bytes | None = None
        self.events: dict[int, Queued] = {}
        self.pieces: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return self.state.next - self.state.head

    @property
    def state(self) -> QueueState:
        return self.record.state

    @property
    def head(self) -> Queued:
        """Return the first event."""
        return self.events[self.state.head]

    @property
    def origin(self) -> Origin:
        """Return the origin of the effects of the next attempt at the head: the same after a restart."""
        return parked_origin(self.head.place, self.state.attempts)

    def is_found_by(self, owner: str) -> bool:
        """Check that its head was last tried by another process, and not yet by this one."""
        return owner not in (self.state.owner, self.state.noted)

    def must_be_noted(self, owner: str) -> bool:
        """Check that this process has to note that it tries the head, before it does. The first attempt behind a
        success needs no note."""
        state = self.state
        return state.noted != owner and (state.attempts > 0 or state.owner != owner)

    def records(self) -> Iterator[Timer]:
        """Yield the records of its events, as they are in the changelog: piece by piece, so a copy that reads some of
        them again has none of another cut."""
        for number, queued in self.events.items():
            yield from _cut(self.name, number, queued, self.pieces[number])

    # -- the changes of an event; none of them is made here ------------------------------------------------------------

    def noted(self, owner: str) -> dict[str, Timer | None]:
        """Note that this process is going to try the head."""
        return self._with(self.record.due_ms, noted=owner)

    def failed(
        self, owner: str, attempts: int, due_ms: int, error: str, handler: str, now_ms: int
    ) -> dict[str, Timer | None]:
        """Keep the head after an attempt that has failed."""
        return self._with(
            due_ms,
            attempts=attempts,
            first_ms=self.state.first_ms or now_ms,
            error=error[:LONGEST_ERROR],
            handler=handler,
            owner=owner,
            noted="",
        )

    def due(self, now_ms: int) -> dict[str, Timer | None]:
        """Have the head tried at this time."""
        return self._with(now_ms, noted="")

    def left(self, owner: str, now_ms: int) -> dict[str, Timer | None]:
        """Let the head go: the next one is due at once, or the key is open."""
        state = self.state
        gone = self._without(state.head)
        if state.head + 1 == state.next:  # the key opens with the last one, never with the first
            return {self.name: None, **gone}
        size = state.bytes - sum(self.pieces[state.head])
        nexts = QueueState(state.head + 1, state.next, size, state.since_ms, owner=owner)
        return {self.name: QueueRecord.of(self.name, now_ms, nexts), **gone}

    def dropped(self) -> dict[str, Timer | None]:
        """Let the whole queue go."""
        gone: dict[str, Timer | None] = {self.name: None}
        for number in self.events:
            gone |= self._without(number)
        return gone

    def followed_by(self, queued: Queued, most: int) -> dict[str, Timer | None]:
        """Queue a further event, in pieces of so many bytes at most."""
        pieces, size = _pieces(self.name, self.state.next, queued, most)
        # The head's time stays, and its record comes first: ``apply`` needs the queue before its events.
        return {**self._with(self.record.due_ms, next=self.state.next + 1, bytes=self.state.bytes + size), **pieces}

    def _with(self, due_ms: int, **fields: int | str) -> dict[str, Timer | None]:
        return {self.name: QueueRecord.of(self.name, due_ms, msgspec.structs.replace(self.state, **fields))}

    def _without(self, number: int) -> dict[str, Timer | None]:
        return {_piece_name(self.name, number, piece): None for piece in range(len(self.pieces[number]))}


class ParkedKeys:
    """The queues of one partition. ``keys``: by the keys that wait; ``by_name``: all of them. ``size``: their bytes."""

    def __init__(self, records: Iterable[Timer] = ()) -> None:
        """Begin with these records. Raises ``BrokenQueue``."""
        self.keys: dict[bytes, Queue] = {}
        self.by_name: dict[str, Queue] = {}
        self.size = 0
        self.events = 0
        pieces: dict[str, dict[int, dict[int, bytes]]] = {}
        for record in records:
            name, number, piece = _taken_apart(record.name)
            if number < 0:
                self.by_name[name] = Queue(QueueRecord.of(name, record.due_ms, _state_of(record)))
            else:
                pieces.setdefault(name, {}).setdefault(number, {})[piece] = record.value
        for name in pieces.keys() - self.by_name.keys():
            raise BrokenQueue(f"the queue {name} has events, and no record of its own")
        for name, queue in self.by_name.items():
            self._restore_events(queue, pieces.get(name, {}))

    def _restore_events(self, queue: Queue, pieces: Mapping[int, Mapping[int, bytes]]) -> None:
        state = queue.state
        # The count first: the numbers of a foreign record may be any, and a range of them would not fit into memory.
        fits = 0 <= state.head < state.next and state.next - state.head == len(pieces)
        if not fits or sorted(pieces) != list(range(state.head, state.next)):
            raise BrokenQueue(
                f"the queue {queue.name} goes from {state.head} to {state.next}, and has the events {sorted(pieces)}"
            )
        for number in sorted(pieces):
            found = pieces[number]
            if sorted(found) != list(range(len(found))):
                raise BrokenQueue(f"event {number} of the queue {queue.name} has the pieces {sorted(found)}")
            data = b"".join(found[piece] for piece in sorted(found))
            try:
                queued = decode_queued(data)
            except msgspec.DecodeError as error:
                raise BrokenQueue(f"event {number} of the queue {queue.name} cannot be read ({error})") from error
            if queued.v > FORMAT or queued.kind not in (_RECORD, _TIMER, _RESULT, _UPDATE):
                raise BrokenQueue(f"event {number} of the queue {queue.name} is of a newer release of this package")
            if queued.queue_name != queue.name:
                raise BrokenQueue(f"event {number} of the queue {queue.name} is of another key, {queued.key!r}")
            self._add(queue, number, queued, tuple(len(found[piece]) for piece in sorted(found)))

    def _add(self, queue: Queue, number: int, queued: Queued, pieces: tuple[int, ...]) -> None:
        queue.events[number], queue.pieces[number] = queued, pieces
        self.size += sum(pieces)
        self.events += 1
        if queued.key is not None:
            queue.key = queued.key
            self.keys[queued.key] = queue

    def apply(self, changes: Mapping[str, Timer | None]) -> None:
        """Make the changes of an event that is complete; those of other timers are passed over."""
        for name, change in changes.items():
            if not name.startswith(PREFIX):
                continue
            owner, number, piece = _taken_apart(name)
            queue = self.by_name.get(owner)
            if isinstance(change, QueueRecord):
                if queue is None:
                    self.by_name[owner] = Queue(change)
                else:
                    queue.record = change
            elif isinstance(change, PieceRecord):
                assert queue is not None  # its record comes first
                if change.queued is not None:
                    self._add(queue, number, change.queued, ())
                queue.pieces[number] += (len(change.value),)
                self.size += len(change.value)
            elif number < 0:
                if queue is not None:
                    self._remove(queue)
            elif queue is not None and piece == 0:
                self._remove_event(queue, number)

    def _remove(self, queue: Queue) -> None:
        for number in list(queue.events):
            self._remove_event(queue, number)
        del self.by_name[queue.name]
        if queue.key is not None:
            del self.keys[queue.key]

    def _remove_event(self, queue: Queue, number: int) -> None:
        del queue.events[number]
        self.size -= sum(queue.pieces.pop(number))
        self.events -= 1

    def begun(
        self,
        queued: Queued,
        owner: str,
        attempts: int,
        due_ms: int,
        error: str,
        handler: str,
        now_ms: int,
        most: int,
    ) -> dict[str, Timer | None]:
        """Return the changes that park a key, with this event as the head. In pieces of so many bytes at most."""
        name = queued.queue_name
        number = queued.first_number(now_ms)
        pieces, size = _pieces(name, number, queued, most)
        state = QueueState(number, number + 1, size, now_ms, attempts, now_ms, error[:LONGEST_ERROR], handler, owner)
        return {name: QueueRecord.of(name, due_ms, state), **pieces}

    def lacks_room(self, config: ParkingConfig, key: bytes | None, size: int) -> str:
        """Return the setting that leaves no room for an event of so many bytes; ``""``: there is room. One event always
        fits into empty queues."""
        queue = None if key is None else self.keys.get(key)
        if queue is None and len(self.by_name) >= config.max_keys:
            return "max_keys"
        if queue is not None and len(queue) >= config.max_key_events:
            return "max_key_events"
        return "max_bytes" if self.by_name and self.size + size > config.max_bytes else ""

    def is_urgent(self, name: str, config: ParkingConfig) -> bool:
        """Check for a queue over half of its bound, which is worked off first."""
        queue = self.by_name.get(name)
        return queue is not None and 2 * len(queue) > config.max_key_events

    def figures(self, full: str) -> tuple[int, int, int, int | None, str]:
        """Return keys, events, bytes, and since when the key that has waited longest does; then ``full``."""
        oldest_ms = min((queue.state.since_ms for queue in self.by_name.values()), default=None)
        return len(self.by_name), self.events, self.size, oldest_ms, full


def is_parked(name: str) -> bool:
    """Check for the name of a queue's record, or of an event's in it."""
    return name.startswith(PREFIX)


def is_piece(name: str) -> bool:
    """Check for the name of an event's record."""
    return name.startswith(PREFIX) and "/" in name[len(PREFIX) :]


def encoded_size(queued: Queued) -> int:
    """Return the bytes that an event has in its queue."""
    return len(encode_queued(queued))


_encode_state: Final = msgspec.json.Encoder().encode
_decode_state: Final = msgspec.json.Decoder(QueueState).decode
encode_queued: Final = msgspec.msgpack.Encoder().encode
decode_queued: Final = msgspec.msgpack.Decoder(Queued).decode


def _state_of(record: Timer) -> QueueState:
    try:
        return _decode_state(record.value)
    except msgspec.DecodeError as error:
        raise BrokenQueue(f"the record of the queue {record.name} cannot be read ({error})") from error


def _piece_name(name: str, number: int, piece: int) -> str:
    return f"{name}/{number:08x}" + (f".{piece:08x}" if piece else "")


def _taken_apart(name: str) -> tuple[str, int, int]:
    """Return the name of the queue, the number of the event (-1: the queue's own record), and that of the piece."""
    owner, slash, rest = name[len(PREFIX) :].partition("/")
    if not slash:
        return name, -1, 0
    number, _, piece = rest.partition(".")
    try:
        return PREFIX + owner, int(number, 16), int(piece, 16) if piece else 0
    except ValueError as error:
        raise BrokenQueue(f"{name!r} is no name of a record of a queue") from error


def _pieces(name: str, number: int, queued: Queued, most: int) -> tuple[dict[str, Timer | None], int]:
    size = encoded_size(queued)
    lengths = [min(most, size - start) for start in range(0, size, most)]
    return {record.name: record for record in _cut(name, number, queued, lengths)}, size


def _cut(name: str, number: int, queued: Queued, lengths: Iterable[int]) -> Iterator[PieceRecord]:
    """Yield the records of an event, in pieces of these lengths."""
    data, start = encode_queued(queued), 0
    for piece, length in enumerate(lengths):
        part, first = data[start : start + length], queued if piece == 0 else None
        yield PieceRecord(_piece_name(name, number, piece), NEVER_MS, EVENT_TYPE, part, queued=first)
        start += length
