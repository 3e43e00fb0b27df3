"""The way of a state into more partitions: which entries stay, and where the others go. No broker is needed for it.

Each entry of a key goes to the partition of its *routing* key, which is the key of the records that have made it. The
same routing key has to name the partition in which the entry is now, by the number of partitions that there was. So a
rule that is not the producers' is found out by the rows themselves, before anything is written, and no key can come to
be in two partitions.

The state is looked at twice: ``look`` at all partitions, then ``settle``, and then ``moved`` for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from streams.codecs import RESERVED_KEY_PREFIX
from streams.core.cron import is_cron
from streams.core.jobs import COUNTER, BrokenJob, JobRecord, Jobs, is_job
from streams.core.parking import is_parked
from streams.core.timers import Timer
from streams.errors import ConfigError, DecodeError, OffsetError, StoreError
from streams.model.loading import described
from streams.model.partitioners import Partitioner, partition_of
from streams.records import IncomingRecord, shown_key
from streams.runtime.changelog import (
    JOIN_PREFIX,
    SEEN_PREFIX,
    TIMER_PREFIX,
    decode_timer,
    encode_timer,
    timer_key,
)
from streams.stores.parts import Reported
from streams.stores.several import Stores

COPY: Final = "copy"
STAY: Final = "stay"

RoutedBy = Callable[[Any], Any]
"""Takes a key of the store, and returns the key of its records (text or bytes); ``None``: it belongs to a partition."""


class Rules(NamedTuple):
    """The rules of one growth. ``routed_by``: by the names of structures, ``""`` for all others. ``shared``: what
    becomes of entries that belong to a partition and not to a key; ``""``: they are refused. ``drops_closed``: windows
    that are closed, and only kept, may go."""

    before: int
    after: int
    routed_by: Mapping[str, RoutedBy]
    partitioner: Partitioner = "murmur2"
    shared: str = ""
    drops_closed: bool = False


class EntryMove(NamedTuple):
    """A change of one partition's entries."""

    partition: int
    key: bytes
    value: bytes | None


class Regrowth:
    """One growth. ``kept``, ``sent``: entries by partition that stay, and that go elsewhere; ``received``: by partition
    that they go to."""

    def __init__(self, store: Any, rules: Rules) -> None:
        """``store``: an empty one, which reads keys."""
        self._store, self._rules = store, rules
        numbers = range(rules.before)
        self.kept = dict.fromkeys(numbers, 0)
        self.sent = dict.fromkeys(numbers, 0)
        self.received = dict.fromkeys(range(rules.after), 0)
        self._names: dict[int, set[str]] = {number: set() for number in range(rules.after)}  # of timers and jobs
        self._counters = dict.fromkeys(range(rules.after), 0)  # the number of the next job
        self._is_counted: set[int] = set()  # those whose counter has changed
        self._own: dict[int, dict[bytes, bytes]] = {}  # entries of the store itself, by partition
        self._origins: dict[int, dict[int, set[str]]] = {}  # by partition: from where it has rows, of which structures
        self._reported: dict[int, dict[str, Reported]] = {}  # by partition that they go to, and structure
        self._settled: dict[int, dict[bytes, bytes]] = {}

    # -- the first look ------------------------------------------------------------------------------------------------

    def look(self, number: int, entries: Mapping[bytes, bytes]) -> None:
        """Look at the state of a partition. Raises ``OffsetError`` and ``StoreError`` for what cannot be moved."""
        self._own[number] = self._own_of(entries)
        self._origins.setdefault(number, {}).setdefault(number, set())
        timers, jobs = self._timers_of(number, entries)
        self._counters[number] = jobs.next
        self._look_at_ids(number, _ids(entries))
        for key, _ in self._rows(entries):
            structure, places = self._places(number, key)
            self._count(number, places)
            for place in places:
                self._origins.setdefault(place, {}).setdefault(number, set()).add(structure)
                self._note_reported(number, structure, key, place)
        for timer in timers:
            self._name(number, timer, self._places_of_timer(number, timer))
        lanes: dict[Any, int] = {}
        for job in jobs.by_name.values():
            place = self._place_of_job(number, job)
            if job.lane is not None and lanes.setdefault(job.lane, place) != place:
                raise OffsetError(
                    f"partition {number}: {job.title} would go to partition {place}, and others of its order to "
                    f"{lanes[job.lane]}: they run one after the other in one partition only. Let them end first"
                )
            self._name(number, job, [place])

    def settle(self) -> None:
        """Bring together what partitions have of their own, once all were looked at. Raises ``StoreError``."""
        if not self._is_stores:
            return
        for place, origins in sorted(self._origins.items()):
            if origins.keys() == {place}:
                continue
            reported = self._reported.get(place, {})
            found = self._store.merged_own(
                self._own.get(place, {}),
                [(self._own[number], names) for number, names in sorted(origins.items())],
                reported,
            )
            for name, (closed, _) in reported.items():
                if _is_above(closed, found.marks[name]) and not self._rules.drops_closed:
                    raise StoreError(
                        f"windows of {name!r} that are closed, and are kept to be read, would meet windows of an "
                        f"earlier time in partition {place} that are open, and be reported a second time. They can be "
                        "dropped: --drop-closed-windows"
                    )
            self._settled[place] = found.entries

    # -- the second one ------------------------------------------------------------------------------------------------

    def moved(self, number: int, entries: Mapping[bytes, bytes]) -> Iterator[EntryMove]:
        """Yield the changes for the same state, looked at again; in the order of partitions. Raises as ``look``."""
        for key, value in self._rows(entries):
            structure, places = self._places(number, key)
            if self._is_dropped(number, structure, key, places):
                yield EntryMove(number, key, None)
            else:
                yield from self._moves(number, key, value, places)
        for key, value in _ids(entries).items():
            yield from self._moves(number, key, value, self._places_of_ids(number))
        timers, jobs = self._timers_of(number, entries)
        for timer in timers:
            key = timer_key(timer.name)
            yield from self._moves(number, key, entries[key], self._places_of_timer(number, timer))
        for job in jobs.by_name.values():
            if (place := self._place_of_job(number, job)) != number:
                # Its id stays, by which receivers know it. Its number is one of the partition: none is given twice.
                again = job.changed(job.due_ms, number=self._counters[place])
                self._counters[place] += 1
                self._is_counted.add(place)
                yield from self._moves(number, timer_key(job.name), encode_timer(again), [place])

    def ends(self) -> Iterator[EntryMove]:
        """Yield the changes of what partitions have of their own, behind all of ``moved``."""
        for place, own in self._settled.items():
            before = self._own.get(place, {})
            yield from (EntryMove(place, key, None) for key in before.keys() - own.keys())
            yield from (EntryMove(place, key, value) for key, value in own.items() if before.get(key) != value)
        for place in sorted(self._is_counted):
            jobs = Jobs()
            jobs.next = self._counters[place]
            yield EntryMove(place, timer_key(COUNTER), encode_timer(jobs.counter))

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _is_stores(self) -> bool:
        return isinstance(self._store, Stores)

    def _own_of(self, entries: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        return {key: entries[key] for key in entries if self._store.is_own(key)} if self._is_stores else {}

    def _rows(self, entries: Mapping[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
        is_own = self._store.is_own if self._is_stores else None
        for key, value in entries.items():
            if not (key.startswith(RESERVED_KEY_PREFIX) or (is_own is not None and is_own(key))):
                yield key, value

    def _timers_of(self, number: int, entries: Mapping[bytes, bytes]) -> tuple[list[Timer], Jobs]:
        timers: list[Timer] = []
        jobs: list[Timer] = []
        for key, value in entries.items():
            if key.startswith(JOIN_PREFIX):
                topic = key[len(JOIN_PREFIX) :].partition(b"\0")[0].decode(errors="replace")
                raise StoreError(
                    f"partition {number} has rows of the joined table {topic}, which lie in the partitions of its "
                    f"topic: they cannot be moved. kes state forget --join {topic} removes them"
                )
            if not key.startswith(TIMER_PREFIX):
                continue
            name, timer = decode_timer(IncomingRecord("", number, 0, key, value, None))
            if is_parked(name):
                raise OffsetError(
                    f"partition {number}: events of parked keys wait: have them worked off first, or drop them (kes "
                    "parked)"
                )
            assert timer is not None  # deletions are no entries
            (jobs if is_job(name) else timers).append(timer)
        try:
            return timers, Jobs(jobs)
        except BrokenJob as error:
            raise OffsetError(f"partition {number}: {error}") from error

    def _places(self, number: int, key: bytes) -> tuple[str, list[int]]:
        """Return the structure of a row, and the partitions that have it."""
        store, structure = self._store, ""
        try:
            decoded: Any
            structure, decoded = store.row_key(key) if self._is_stores else ("", store.decode_key(key))
        except DecodeError as error:
            raise StoreError(f"partition {number}, key {shown_key(key)}: {error}") from error
        by = self._rules.routed_by
        routed_by = by.get(structure) or by.get("")
        try:
            routed = decoded if routed_by is None else routed_by(decoded)
        except Exception as error:
            raise ConfigError(f"partition {number}, key {_shown(decoded)}: --routed-by: {described(error)}") from error
        what = f"key {_shown(decoded)}" + (f" of {structure!r}" if structure else "")
        if routed is None:
            return structure, self._shared(number, what)
        if not isinstance(routed, str | bytes):
            raise ConfigError(
                f"partition {number}, {what}: it is routed by {type(routed).__name__}: say by --routed-by which key, "
                "text or bytes, its records have"
            )
        return structure, [self._place(number, routed, what)]

    def _place(self, number: int, routed: str | bytes, what: str) -> int:
        """Return the partition of a routing key. Raises ``StoreError`` if that of now is another one."""
        rules = self._rules
        due = partition_of(routed, rules.before, rules.partitioner)
        if due != number:
            raise StoreError(
                f"partition {number}, {what}: records of the key {_shown(routed)} are in partition {due} of "
                f"{rules.before}, so this is not the key of the records that have made it. Say by --routed-by which "
                "one it is (None: it belongs to the partition), or by --partitioner how producers place keys"
            )
        return partition_of(routed, rules.after, rules.partitioner)

    def _shared(self, number: int, what: str) -> list[int]:
        rules = self._rules
        if rules.shared == STAY:
            return [number]
        if rules.shared == COPY:
            return [number, *(place for place in range(rules.before, rules.after) if place % rules.before == number)]
        raise StoreError(
            f"partition {number}, {what}: it belongs to the partition, and to no key. Say --shared {COPY} (each new "
            f"partition gets it, from the partition of its number modulo {rules.before}), or --shared {STAY}"
        )

    def _look_at_ids(self, number: int, ids: Mapping[bytes, bytes]) -> None:
        if ids and not self._rules.shared:
            raise StoreError(
                f"partition {number} has the ids of {len(ids):,} events that were handled once (once=), and nothing "
                f"says which keys they had. Say --shared {COPY} (each partition gets those of all: right where no two "
                f"events have one id), or --shared {STAY} (a duplicate whose key has moved is handled again)"
            )
        for _ in ids:
            self._count(number, self._places_of_ids(number))

    def _places_of_ids(self, number: int) -> list[int]:
        return [number] if self._rules.shared == STAY else list(range(self._rules.after))

    def _places_of_timer(self, number: int, timer: Timer) -> list[int]:
        if is_cron(timer.name):
            return [number]  # new partitions set their own
        if timer.key is None:
            return self._shared(number, timer.title)
        return [self._place(number, timer.key, timer.title)]

    def _place_of_job(self, number: int, job: JobRecord) -> int:
        return number if job.key is None else self._place(number, job.key, job.title)

    def _name(self, number: int, timer: Timer, places: list[int]) -> None:
        for place in places:
            if timer.name in self._names[place]:
                raise StoreError(
                    f"partition {number}: {timer.title} would go to partition {place}, which has another one of this "
                    "name, or gets one: names are those of a partition. Let one of them end first"
                )
            self._names[place].add(timer.name)
        self._count(number, places)

    def _count(self, number: int, places: Iterable[int]) -> None:
        for place in places:
            if place == number:
                self.kept[number] += 1
            else:
                self.received[place] += 1
        self.sent[number] += number not in places

    def _closing(self, number: int, structure: str, key: bytes) -> tuple[bytes | None, bool]:
        """Return the place of an entry that is reported, and whether it was; ``None``: it is none."""
        place = self._store.closing_place(key) if self._is_stores else None
        return place, place is not None and not _is_above(place, self._store.mark_in(self._own[number], structure))

    def _note_reported(self, number: int, structure: str, key: bytes, to: int) -> None:
        place, is_closed = self._closing(number, structure, key)
        if place is None:
            return
        of_place = self._reported.setdefault(to, {})
        closed, first_open = of_place.get(structure, Reported())
        if is_closed:
            closed = place if closed is None else max(closed, place)
        else:
            first_open = place if first_open is None else min(first_open, place)
        of_place[structure] = Reported(closed, first_open)

    def _is_dropped(self, number: int, structure: str, key: bytes, places: list[int]) -> bool:
        """Check for an entry that was reported, and would be a second time where it goes."""
        place, is_closed = self._closing(number, structure, key)
        settled = [self._settled[to] for to in places if to in self._settled]
        return is_closed and any(_is_above(place, self._store.mark_in(own, structure)) for own in settled)

    def _moves(self, number: int, key: bytes, value: bytes, places: list[int]) -> Iterator[EntryMove]:
        yield from (EntryMove(place, key, value) for place in places if place != number)
        if number not in places:
            yield EntryMove(number, key, None)


def _ids(entries: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    return {key: value for key, value in entries.items() if key.startswith(SEEN_PREFIX)}


def _is_above(place: bytes | None, mark: bytes | None) -> bool:
    return place is not None and (mark is None or place > mark)


def _shown(key: object) -> str:
    return shown_key(key) if isinstance(key, bytes) else repr(key)[:80]
