"""The folder of one partition as a model: what of the changelog is written, marked and believed, each rule a switch.

A world has one key, a changelog with transactions that are open for a while, a member with a disk, which dies and comes
back, and another member that works meanwhile. Changes reach the disk before the mark that counts them. Time goes by in
steps of ``delete.retention.ms``. Luck is what becomes of open transactions, deaths, compaction, time, and a log that is
cut.

``core/checkpoints.py`` and ``runtime/keeping`` are the code. Not in it: copies, whose databases may hold what follows
their marks; the loss of power; several folders; a log with several keys that is cut, written on and compacted before
the member is back.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps

OFFSET = "offset"
"""The key of offset records; the other one is ``key``."""


class FolderConfig(NamedTuple):
    """``serials``: transactions in all; ``open``: at a time; ``ticks``: how long it goes on."""

    name: str
    serials: int = 3
    open: int = 2
    ticks: int = 1
    deaths: int = 1
    cuts: int = 0


PLAIN = FolderConfig("plain")
CUT = FolderConfig("a log that is cut", ticks=0, deaths=2, cuts=1)
TWICE = FolderConfig("two deaths", ticks=2, deaths=2)
STANDARD = (PLAIN, CUT)
DEEP = (TWICE, FolderConfig("four transactions", serials=4))


class FolderRule(Enum):
    """A rule of folders: what happens when it is out, and the world where it is missed."""

    K1_COMMITTED_ONLY = ("changes are gathered when they are sent, before their transaction is committed", PLAIN)
    K2_MARK_OF_COMMITTED = ("the mark is the end of the log, with transactions in it that are open", PLAIN)
    K3_MARK_LAST = ("the mark is written before what it counts", PLAIN)
    K3_KEPT_UNTIL_WRITTEN = ("what is being written is forgotten when the next checkpoint is begun", PLAIN)
    K4_TOMBSTONES = ("a folder is believed whose age tombstones do not reach", PLAIN)
    K4_AGE_OF_RECORD = ("the age of a mark counts from its writing", PLAIN)
    K4_RECORD = ("a folder is believed although another record is at its mark", CUT)
    K3_COUNTED_ONLY = ("what is on disk counts before its mark is there", PLAIN)


class Record(NamedTuple):
    serial: int
    key: str
    value: int


class Mark(NamedTuple):
    """``value`` and ``offset`` of the offset record that it names; ``as_of``: when that was appended."""

    offset: int
    value: int
    as_of: int


Changes = tuple[int, ...]
"""The value of the key that is on its way, 0 for its deletion; or nothing."""


class World(NamedTuple):
    """``value``: of the key on disk, 0 for none; ``written``: what is there and does not count yet. ``times``: of the
    transactions, by serial. ``log`` has all records; those that compaction ``removed`` cannot be read any more."""

    log: tuple[Record, ...] = ()
    removed: frozenset[int] = frozenset()
    committed: frozenset[int] = frozenset()
    waiting: tuple[int, ...] = ()
    times: tuple[int, ...] = ()
    now: int = 0
    is_up: bool = True
    value: int = 0
    mark: Mark | None = None
    gathered: Changes = ()
    point: Mark | None = None
    writing: Changes = ()
    written: Changes = ()
    next_mark: Mark | None = None
    deaths: int = 0
    cuts: int = 0


class FolderModel:
    """The rules of folders without those that are ``out``."""

    def __init__(self, config: FolderConfig, out: frozenset[FolderRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World()

    def done(self, world: World) -> bool:
        is_written = not world.gathered and not world.writing and world.next_mark is None
        return len(world.times) == self._config.serials and not world.waiting and world.is_up and is_written

    def stalled(self, world: World) -> str:
        return "nothing can happen any more"

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        steps: Steps[World] = []
        luck: Steps[World] = []
        serial = len(world.times) + 1
        if serial <= self._config.serials and len(world.waiting) < self._config.open:
            steps += [(f"{serial} sends a value", self._sent(world, serial, serial))]
            steps += [(f"{serial} sends a deletion", self._sent(world, serial, 0))]
        if world.waiting:
            steps.append((f"{world.waiting[0]} is committed", self._settled(world, is_committed=True)))
            luck.append((f"{world.waiting[0]} is aborted", self._settled(world, is_committed=False)))
        steps += self._writes(world) if world.is_up else [("it comes back", self._back(world))]
        if world.is_up and world.deaths < self._config.deaths:
            luck.append(("it dies", self._dead(world)))
        if not world.is_up and not world.waiting and world.cuts < self._config.cuts:
            luck += [(f"the log is cut at {end}", self._cut(world, end)) for end in range(0, len(world.log), 2)]
        if world.now < self._config.ticks:
            luck.append(("time goes by", world._replace(now=world.now + 1)))
        if (compacted := self._compacted(world)) != world:
            luck.append(("the log is compacted", compacted))
        return steps, luck

    # -- the log -------------------------------------------------------------------------------------------------------

    def _sent(self, world: World, serial: int, value: int) -> World:
        log = (*world.log, Record(serial, "key", value), Record(serial, OFFSET, serial))
        after = world._replace(log=log, waiting=(*world.waiting, serial), times=(*world.times, world.now))
        early = FolderRule.K1_COMMITTED_ONLY in self._out and world.point is not None
        return after._replace(gathered=(value,)) if early else after

    def _settled(self, world: World, *, is_committed: bool) -> World:
        serial, *rest = world.waiting
        after = world._replace(waiting=tuple(rest))
        if not is_committed:
            return after
        after = after._replace(committed=world.committed | {serial})
        return self._gather(after, serial) if world.is_up else after

    def _gather(self, world: World, serial: int) -> World:
        at = max(at for at, record in enumerate(world.log) if record.serial == serial)
        point = Mark(at, serial, world.times[serial - 1])
        return world._replace(gathered=(world.log[at - 1].value,), point=point)

    def _compacted(self, world: World) -> World:
        """Of each key the last committed record stays; a deletion not even that, after its time."""
        end = min((at for at, record in enumerate(world.log) if record.serial in world.waiting), default=len(world.log))
        last = {world.log[at].key: at for at in range(end) if world.log[at].serial in world.committed}
        gone = {at for at in range(end) if last.get(world.log[at].key) != at}
        for at in last.values():
            if world.log[at].value == 0 and world.now > world.times[world.log[at].serial - 1]:
                gone.add(at)
        return world._replace(removed=world.removed | gone)

    def _cut(self, world: World, end: int) -> World:
        """The rest is lost. Not behind a compaction: what that removed for something in the rest would be lost, too."""
        return world._replace(log=world.log[:end], cuts=world.cuts + 1) if not world.removed else world

    def _readable(self, world: World, begin: int) -> list[tuple[int, Record]]:
        found = [(at, world.log[at]) for at in range(begin, len(world.log)) if at not in world.removed]
        return [(at, record) for at, record in found if record.serial in world.committed]

    # -- the disk ------------------------------------------------------------------------------------------------------

    def _writes(self, world: World) -> Steps[World]:
        if world.writing:
            return [("a change reaches the disk", self._counted(world._replace(writing=(), written=world.writing)))]
        if world.next_mark is not None:
            mark = world.next_mark
            if FolderRule.K4_AGE_OF_RECORD in self._out:
                mark = mark._replace(as_of=world.now)
            return [("the mark reaches the disk", self._counted(world._replace(mark=mark, next_mark=None)))]
        if not world.gathered:
            return []
        point = world.point
        if FolderRule.K2_MARK_OF_COMMITTED in self._out:
            point = Mark(len(world.log) - 1, world.log[-1].serial, world.times[world.log[-1].serial - 1])
        after = world._replace(writing=world.gathered, gathered=(), next_mark=point)
        if FolderRule.K3_MARK_LAST in self._out:
            after = after._replace(mark=point, next_mark=None)
        if FolderRule.K3_KEPT_UNTIL_WRITTEN in self._out:
            after = after._replace(writing=())
        return [("a checkpoint is begun", after)]

    def _counted(self, world: World) -> World:
        """What is written counts when its mark is there."""
        if not world.written or (world.next_mark is not None and FolderRule.K3_COUNTED_ONLY not in self._out):
            return world
        return world._replace(value=world.written[0], written=())

    def _dead(self, world: World) -> World:
        return world._replace(
            is_up=False, gathered=(), point=None, writing=(), written=(), next_mark=None, deaths=world.deaths + 1
        )

    def _is_believed(self, world: World, mark: Mark) -> bool:
        if world.now > mark.as_of and FolderRule.K4_TOMBSTONES not in self._out:
            return False
        if FolderRule.K4_RECORD in self._out:
            return True
        readable = self._readable(world, mark.offset)
        # The last offset record is never compacted away, so the marked one is there, or a younger one is.
        return bool(readable) and (readable[0][0] > mark.offset or readable[0][1].value == mark.value)

    def _back(self, world: World) -> World:
        """It starts when open transactions have ended: reads on from its mark, and has the state of the log, or not."""
        if world.waiting:
            return world
        value, mark = world.value, world.mark
        if mark is not None and not self._is_believed(world, mark):
            value, mark = 0, None
        records = self._readable(world, 0 if mark is None else mark.offset + 1)
        values = [record.value for _, record in records if record.key == "key"]
        points = [Mark(at, one.serial, world.times[one.serial - 1]) for at, one in records if one.key == OFFSET]
        wanted = [one.value for one in world.log if one.key == "key" and one.serial in world.committed]
        found = values[-1] if values else value
        if found != (wanted[-1] if wanted else 0):
            raise Broken(f"the state is {found}, and {wanted} were committed (0: deleted); its mark was {world.mark}")
        gathered = (values[-1],) if values else ()
        point = points[-1] if points else mark
        return world._replace(is_up=True, value=value, mark=mark, gathered=gathered, point=point)
