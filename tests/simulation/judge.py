"""What must be true when a world has come to its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from streams.codecs import RESERVED_KEY_PREFIX
from streams.core.checkpoints import FolderMark
from streams.core.jobs import COUNTER
from streams.core.manifests import decode_manifest
from streams.core.seen import digest_of
from streams.core.timers import Timer
from streams.disk import SQLite
from streams.errors import MembershipLost, NotOwned, RecordRefused, Stopped
from streams.events import event_type_of
from streams.runtime.changelog import OFFSET_KEY, RELEASE_KEY, SEEN_PREFIX, TIMER_PREFIX, decode_offset, decode_timer
from streams.runtime.keeping.folders.entries import Damaged, decode_pieces
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.partition.dead_letters import PREFIX
from streams.runtime.partition.parking_acts import LetGo
from streams.runtime.partition.timers import is_own
from streams.stores.framed import OWN
from streams.testing.simulation.broker import Log, LogEntry

from . import jobs_program, once_program, program

CHANGELOG, DEAD_LETTERS = "sim.in.changelog", "sim.in.dead-letters"
EXPECTED = (MembershipLost, NotOwned, Stopped, RecordRefused)
"""What ``interject`` may raise; the last one when another event of its transaction is refused, and it is undone too."""


class Judge:
    """Compares the logs of a world with a fold of its input, and adds what is wrong to its ``differences``."""

    def __init__(self, world: Any) -> None:
        self._world, self._plan, self._broker = world, world.plan, world.broker
        self._differences: list[str] = world.differences

    def _partitions(self, topic: str) -> list[Log]:
        return [self._broker.log(topic, number) for number in range(self._plan.partitions)]

    def ends(self) -> dict[int, int]:
        """Where the input ends, of each partition that has any."""
        return {log.partition: log.end for log in self._partitions(program.TOPIC) if log.end}

    def changelog_offsets(self) -> dict[int, int]:
        """How far the input is handled, and committed."""
        return {
            log.partition: decode_offset(record).offset
            for log in self._partitions(CHANGELOG)
            for record in log.committed(0, log.end)
            if record.key == OFFSET_KEY and decode_offset(record).offset
        }

    def timers(self, partition: int) -> dict[str, Timer]:
        """Those that are committed in the changelog of a partition."""
        log = self._broker.log(CHANGELOG, partition)
        found = dict[str, Timer | None]()
        for record in log.committed(0, log.end):
            if record.key is not None and record.key.startswith(TIMER_PREFIX):
                found.update([decode_timer(record)])
        return {name: timer for name, timer in found.items() if timer is not None}

    def ids(self, partition: int) -> set[bytes]:
        """The digests that are committed in the changelog of a partition."""
        log = self._broker.log(CHANGELOG, partition)
        last = _last_values((record.key or b"", record.value) for record in log.committed(0, log.end))
        return {key[len(SEEN_PREFIX) :] for key in last if key.startswith(SEEN_PREFIX)}

    def rings_left(self) -> int:
        """Timers that will ring soon, and the records of parked keys and of jobs."""
        partitions = range(self._plan.partitions) if self._plan.timers or self._plan.parks or self._plan.jobs else ()
        now_ms = self._world.loop.time() * 1000
        timers = [timer for number in partitions for timer in self.timers(number).values()]
        return sum((is_own(timer.name) and timer.name != COUNTER) or timer.due_ms < now_ms + 1e6 for timer in timers)

    def judge(self) -> None:
        """At the very end."""
        say = self._differences.append
        for log in self._broker.logs.values():
            if log.stable != log.end:
                say(f"{log.topic}[{log.partition}]: a transaction hangs, {log.stable} of {log.end}")
        expected: dict[bytes, list[bytes]] = defaultdict(list)
        gone = set(self._let_go())
        for log in self._partitions(program.TOPIC):
            state, ids = dict[str, int](), set[str]()
            letters = []
            self._judge_timers(log)
            for record in log.committed(0, log.end):
                is_gone = (log.partition, record.offset) in gone
                outputs, letter = ([], True) if is_gone else program.fold(state, ids, record)
                for key, value in outputs:
                    expected[key].append(value)
                letters += [record.value] if letter else []
            self._compare(f"state of {log.partition}", state, self._state(log.partition))
            self._compare(f"ids of {log.partition}", {*map(_digest, ids)}, self.ids(log.partition))
            dead = self._broker.log(DEAD_LETTERS, log.partition)
            there = [record.value for record in dead.committed(0, dead.end)]
            if self._plan.struck or self._plan.jobs:  # letters come when an operator asks, and from parked keys
                letters.sort()
                there.sort()
            self._compare(f"dead letters of {log.partition}", letters, there)
        seen: dict[bytes, list[bytes]] = defaultdict(list)
        for log in self._partitions(program.OUT):
            for record in log.committed(0, log.end):
                seen[record.key or b""].append(record.value or b"")
        for key in sorted(expected.keys() | seen.keys()):
            self._compare(f"outputs of {key!r}", expected[key], seen[key])
        if not self._world.forgot:
            committed = {partition: offset for partition, offset in self._broker.offsets.items() if offset}
            self._compare("committed offsets", self.changelog_offsets(), committed)
        self._judge_interjections()
        if self._world.folder:
            self._judge_folders(Path(self._world.folder))

    def _let_go(self) -> Iterator[tuple[int, int]]:
        """Yield partition and offset of the events that an operator has let go: one for each that he has named."""
        count = 0
        for log in self._partitions(DEAD_LETTERS):
            for record in log.committed(0, log.end):
                facts = {name: value or b"" for name, value in record.headers or ()}
                if facts[PREFIX + "error"] == LetGo.__name__.encode():
                    count += 1
                    yield log.partition, int(facts[PREFIX + "offset"])
        asked = len(self._world.operator.asked)
        if count > asked:
            self._differences.append(f"an operator has named {asked} events, and {count} have gone")

    def _judge_folders(self, root: Path) -> None:
        """Each folder is what was committed in its changelog up to its mark, and nothing else. Where the log is
        compacted a copy may lack what was written over behind its mark: that comes when it is read on."""
        for path in sorted(path.parent for path in root.rglob("mark")):
            folder = StateFolder(path, -1)
            mark = folder._read_mark()
            assert mark is not None
            if path.name.endswith(".aside"):
                continue
            if (path / mark.file).is_dir():
                self._judge_database(path, mark.file)
                continue
            try:
                folder.check(mark.identity, now_ms=mark.as_of_ms, tombstones_ms=1 << 40)
            except Damaged as error:
                self._differences.append(f"the folder {path.name}: {error}")
                continue
            rows = [(change.key, change.value) for changes in folder.load() for change in changes]
            self._judge_state(f"the folder {path.name}", mark, rows)
        for path in sorted(root.rglob("manifest-*")):
            manifest = decode_manifest(path.read_bytes(), b"")
            pieces = [(path.parent / "blocks" / block.name).read_bytes() for block in manifest.blocks]
            rows = [(change.key, change.value) for changes in decode_pieces(pieces, "") for change in changes]
            self._judge_state(f"the snapshot {path.name}", manifest.mark, rows, has_more=self._world.plan.on_disk)

    def _judge_database(self, path: Path, name: str) -> None:
        """A database may have what is behind its mark, too."""
        database = SQLite().open(str(path / name), memory_bytes=1 << 20, partitions=1)
        try:
            mark = msgspec.json.decode(database.mark() or b"", type=FolderMark)
            rows = database.scan(None, None, reverse=False, limit=1 << 30)
        finally:
            database.close()
        self._judge_state(f"the database of {path.name}", mark, rows, has_more=True)

    def _judge_state(self, what: str, mark: FolderMark, rows: Any, *, has_more: bool = False) -> None:
        entries = self._broker.log(CHANGELOG, mark.identity.partition).entries
        state, expected = _last_values(rows), _last_values(_committed(entries[: mark.offset + 1]))
        if has_more or any(entry.gone for entry in entries):
            for key, _ in _committed(entries[mark.offset + 1 :]):
                state.pop(key, None)
                expected.pop(key, None)
        self._compare(f"{what} up to offset {mark.offset}", expected, state)

    def _compare(self, what: str, expected: Any, seen: Any) -> None:
        if isinstance(expected, list) and expected != seen:
            pairs = enumerate(zip(expected, seen, strict=False))
            at = next((number for number, (one, other) in pairs if one != other), min(len(expected), len(seen)))
            what += f" ({len(expected)} expected, {len(seen)} seen), from number {at} on"
            expected, seen = expected[at : at + 3], seen[at : at + 3]
        if expected != seen:
            self._differences.append(f"{what}: expected {expected}, but there is {seen}")

    def changelog(self, partition: int) -> dict[str, int]:
        """What is committed in the changelog of a partition."""
        log = self._broker.log(CHANGELOG, partition)
        state: dict[str, int] = {}
        for record in log.committed(0, log.end):
            if record.key is None or record.key.startswith((RESERVED_KEY_PREFIX, OWN)):
                continue
            key = record.key.decode() if self._plan.patient else program.codec_for(str).decode(record.key)
            if record.value is None:
                state.pop(key, None)
            else:
                value = int(record.value) if self._plan.patient else program.codec_for(int).decode(record.value)
                state[key] = value
        return state

    def _state(self, partition: int) -> dict[str, int]:
        """The same without what interjections count, which is judged here."""
        state = self.changelog(partition)
        for key, topic in ((program.TICK_KEY, program.TICKS), (program.RING_KEY, program.RINGS)):
            count = state.pop(key, 0)
            self._compare(
                f"{topic} of {partition}", list(range(1, count + 1)), [t.value for t in self._totals(topic, partition)]
            )
        told = [event_type_of(jobs_program.Told).decode(value) for value in self._of(jobs_program.ENDS, partition)]
        count = state.pop(jobs_program.ENDS_KEY, 0)
        self._compare(f"what is told of jobs of {partition}", [*range(1, count + 1)], [one.value for one in told])
        self._world.receiver.judge(partition, told)
        self._world.watch.counts["jobs"] += sum(one.what in ("ended", "failed") for one in told)
        return state

    def _totals(self, topic: str, partition: int) -> list[program.ValueAt]:
        """What the partition's interjections, or timers, sent."""
        return [event_type_of(program.ValueAt).decode(value) for value in self._of(topic, partition)]

    def _of(self, topic: str, partition: int) -> list[bytes]:
        """The records that have this partition as their key."""
        return [
            record.value or b""
            for log in self._partitions(topic)
            for record in log.committed(0, log.end)
            if record.key == b"%d" % partition
        ]

    def _judge_timers(self, log: Log) -> None:
        """Each that was to ring has rung once; what is left are the reminders that were not cancelled."""
        rings, reminders = [], dict[str, int]()
        for record in log.committed(0, log.end):
            if record.record_type == "Alarm":
                event = event_type_of(program.KINDS["Alarm"]).decode(record.value)
                if event.amount < 8:
                    rings.append(record.offset)
                elif event.amount == 8:
                    reminders[event.key] = record.offset
                else:
                    reminders.pop(event.key, None)
        rung = sorted(total.offset for total in self._totals(program.RINGS, log.partition))
        self._world.watch.counts["rang"] += len(rung)
        self._compare(f"timers that rang of {log.partition}", rings, rung)
        timers = self.timers(log.partition)
        self._compare(
            f"parked keys and jobs of {log.partition}",
            [],
            [name for name in timers if is_own(name) and name != COUNTER],
        )
        left = {
            name: event_type_of(program.AlarmRing).decode(t.value).offset
            for name, t in timers.items()
            if not is_own(name)
        }
        self._compare(f"timers that are left of {log.partition}", reminders, left)

    def stores(self) -> None:
        """Once everything is settled: each store, and each copy that has read all, is what the changelog says."""
        for partition in range(self._plan.partitions):
            expected, end = self.changelog(partition), self._broker.log(CHANGELOG, partition).stable
            timers, ids = self.timers(partition), self.ids(partition)
            for name, member in self._world.members.items():
                engine = member.source._run.engine
                if engine is None or member.process.dead or member.task.done():
                    continue
                worker, copy = engine.workers.get(partition), engine.replicas.standing().get(partition)
                if worker is not None:
                    self._same_but_ticks(f"store of {partition} at {name}", expected, worker.store)
                    self._compare(f"timers of {partition} at {name}", timers, worker.timers.contents())
                    self._compare(f"ids of {partition} at {name}", ids, {*worker.seen.rows._by_digest})
                elif copy is not None and copy.position >= end:
                    self._same_but_ticks(f"copy of {partition} at {name}", expected, copy.store)
                    self._compare(f"timers in the copy of {partition} at {name}", timers, copy.timers)
                    self._compare(f"ids in the copy of {partition} at {name}", ids, {*copy.seen.rows._by_digest})

    def _same_but_ticks(self, what: str, expected: dict[str, int], store: Any) -> None:
        """Scheduled interjections may have counted on since."""
        seen = store.contents()
        if self._plan.structures:
            log = self._broker.log(CHANGELOG, store.partition.partition)
            committed = _last_values((record.key, record.value) for record in log.committed(0, log.end) if record.key)
            structures = {key: value for key, value in committed.items() if key.startswith(OWN)}
            self._compare(f"{what}: structures", structures, {k: v for k, v in store.dump() if k.startswith(OWN)})
            self._world.watch.counts["windows"] += len(store.closed)
        self._compare(what, {**expected, program.TICK_KEY: 0}, {**seen, program.TICK_KEY: 0})

    def _judge_interjections(self) -> None:
        seen = [r.key.decode() for log in self._partitions(program.TOKENS) for r in log.committed(0, log.end) if r.key]
        for token, task, member in self._world.tokens:
            count = seen.count(token)
            if member.process.dead:
                allowed = {0, 1}
            elif not task.done():
                self._differences.append(f"the interjection {token} is waited for, for ever")
                continue
            else:
                error = task.exception()
                allowed = {1} if error is None else {0, 1} if isinstance(error, MembershipLost) else {0}
                if error is not None and not isinstance(error, EXPECTED):
                    self._differences.append(f"the interjection {token} failed: {error!r}")
            if count not in allowed:
                self._differences.append(f"the interjection {token} is there {count} times, {task!r}")


def _committed(entries: Iterable[LogEntry]) -> Iterator[tuple[bytes, bytes | None]]:
    """Changes and timers, whether they are compacted away or not."""
    for entry in entries:
        committed = not entry.marker and (entry.txn is None or entry.txn.outcome)
        if committed and entry.key is not None and entry.key not in (OFFSET_KEY, RELEASE_KEY):
            yield entry.key, entry.value


def _digest(id: str) -> bytes:
    return digest_of(once_program.SCOPE, id)


def _last_values(changes: Iterable[tuple[bytes, bytes | None]]) -> dict[bytes, bytes]:
    return {key: value for key, value in dict(changes).items() if value is not None}
