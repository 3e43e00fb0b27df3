"""Take over partitions: fence, barrier, state and offset, start (protocol, section 7).

``core/takeover.py`` decides the order of the steps; here they are carried out. A partition starts at the changelog's
offset: the group's would count records twice after a coordinator lost its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import anyio

from streams.core.position import Position, position_of
from streams.core.takeover import BARRIER, PartitionStand, Stand, Step, next_step
from streams.errors import BrokerUnavailable, OffsetError, TopicError, TransactionFailed
from streams.metrics import OffsetMismatch, TakeOverDone
from streams.model.group import TakeOver
from streams.records import TopicPartition
from streams.runtime.changelog import TopicIds
from streams.runtime.member import Member
from streams.runtime.ownership.beginnings import Beginnings
from streams.runtime.ownership.blocked import BlockedEvents
from streams.runtime.ownership.missed_deletions import Missed, MissedDeletions, is_restoring
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.ownership.range_reader import Range, Read
from streams.runtime.ownership.replica import Replica
from streams.runtime.ownership.replicas import Replicas
from streams.runtime.ownership.stalls import Stalls
from streams.runtime.ownership.topic_watch import TopicWatch, refuse_replaced, refuse_replaced_input
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.ports import SourceLog
from streams.runtime.reading.log_follower import FROM_START

_log = logging.getLogger(__name__)

STEP_SECONDS = 20.0
"""One request to the broker takes so many seconds, at most. It may wait for a transaction of another member, which
ends within its timeout (5 s by default) plus the broker's sweep for transactions that are overdue (10 s)."""

STALLED_SECONDS = 5.0
"""After so many seconds without progress of a barrier or a restore all requests are made again, the fence included."""

CHANGES_TOGETHER = 1_000
"""A start admits at most so many changes as one event. No transaction cuts an event, so more might not fit into one."""


class InputStand(NamedTuple):
    """The broker's answers about one input of a partition."""

    topic: str
    topic_id: str
    group_offset: int | None
    range: Range


class _Attempt:
    """The answers of one attempt to take partitions over. ``stand``: what follows from them for its next step."""

    def __init__(self, workers: Iterable[PartitionWorker], topics: list[str], now: float) -> None:
        """``topics``: the inputs, the source's own topic first."""
        self.workers = {worker.partition: worker for worker in workers}
        self.topics = topics
        self.stand = Stand(self.workers)
        self.began_at = self.fenced_at = self.barrier_at = now
        self.group_offsets: list[dict[int, int | None]] = []  # of each input
        self.changelog: dict[int, Range] = {}
        self.changelog_id = ""
        self.logs: list[tuple[dict[int, Range], str]] = []  # of each input, with its id
        self.missed: dict[int, Missed] = {}
        self.failure: BrokerUnavailable | None = None  # of the request that was not answered
        self.positions: dict[int, int] = {}
        self.moved_at = now

    @property
    def ids(self) -> TopicIds:
        """The topics that the answers are about."""
        return TopicIds(self.logs[0][1], self.changelog_id)

    def inputs(self, number: int) -> list[InputStand]:
        """Return the answers about the inputs of a partition, the source's own topic first."""
        return [
            InputStand(topic, topic_id, offsets.get(number), log[number])
            for topic, offsets, (log, topic_id) in zip(self.topics, self.group_offsets, self.logs, strict=True)
        ]

    def unmoved(self, positions: dict[int, int], now: float) -> float:
        """Note the positions of the copies that are waited for. Returns for how many seconds they have not changed."""
        if positions != self.positions:
            self.positions, self.moved_at = positions, now
        return now - self.moved_at


class TakeOvers:
    """Take-overs of one member. On the loop."""

    def __init__(
        self,
        member: Member,
        partitions: Partitions,
        replicas: Replicas,
        topic_watch: TopicWatch,
        read: Read,
    ) -> None:
        self._member = member
        self._partitions = partitions
        self._replicas = replicas
        self._topic_watch = topic_watch
        self._config = member.config
        self._source = member.thread("kes-source")
        self.stalls = Stalls(member)
        self.blocked = BlockedEvents(member)
        self._missed = MissedDeletions(member, replicas, read)
        self._beginnings = Beginnings(member, self._source) if self._config.start_at else None

    async def take_over(self, workers: Collection[PartitionWorker]) -> None:
        """Bring these partitions to work; keeps trying while the broker does not answer. Partitions that are taken away
        meanwhile are left out. Raises ``OffsetError`` and ``TopicError`` when state and log do not fit together."""
        pause = 0.1
        held = [worker.partition for worker in workers]
        try:
            while waiting := [worker for worker in workers if is_restoring(worker)]:
                for worker in waiting:
                    self._replicas.hold(worker.partition)  # read during the requests; the end is known after them
                try:
                    await self._once(waiting)
                except (BrokerUnavailable, TransactionFailed) as error:
                    names = ", ".join(str(worker.topic_partition) for worker in waiting)
                    _log.warning("take-over of %s waits for the broker: %s", names, error)
                    await anyio.sleep(pause)
                    pause = min(pause * 2, 1.0)
        except (OffsetError, TopicError):
            # If the topic was replaced, that is the error: nothing of the other partitions is drained into it then.
            await self._topic_watch.check()
            raise
        finally:
            for partition in held:
                # With a worker here the partition works by now, or another take-over holds it, or the source stops.
                if self._member.workers.get(partition) is None:
                    self._replicas.unhold(partition)

    async def _once(self, workers: Sequence[PartitionWorker]) -> None:
        """Make one attempt: ``core/takeover.py`` decides each step. Raises ``BrokerUnavailable`` if it is to be made
        again, from the fence on."""
        attempt = _Attempt(workers, [self._config.topic, *self._partitions.further_topics], self._member.now())
        stand = attempt.stand
        while (step := self._next_step(attempt)) is not Step.DONE:
            if step in BARRIER:
                await self._ask(step, attempt)
                stand.answer()
            elif stand.at_hand is not None:
                await self._advance(step, stand.at_hand, attempt)
            else:
                await self._end_round(step, attempt)

    def _next_step(self, attempt: _Attempt) -> Step:
        stand = attempt.stand
        # This is read anew before each step: the last one may have awaited, and a rebalance come meanwhile.
        stand.is_current = self._member.is_current
        if stand.at_hand is not None:
            stand.at_hand.is_restoring = is_restoring(attempt.workers[stand.at_hand.number])
        else:
            positions = {number: self._replicas.position(number) for number in stand.waiting}
            stand.unmoved_seconds = attempt.unmoved(positions, self._member.now())
        return next_step(stand, STALLED_SECONDS)

    async def _ask(self, step: Step, attempt: _Attempt) -> None:
        """Make a request of the barrier."""
        member, numbers, topics = self._member, [*attempt.workers], attempt.topics
        match step:
            case Step.SETTLE:
                await member.slots.wait_all_replaced(self._config.timeouts.recovery_timeout_seconds)
            case Step.FENCE:
                fence, deadline = member.takeover_client.fence_departed, member.now() + STEP_SECONDS
                fenced = await member.control.call(fence, member.members, deadline)
                if fenced:
                    _log.info("ended the open transactions of members that are gone: %s", ", ".join(fenced))
                attempt.fenced_at = member.now()
            case Step.SETTLE_LOOKUPS:
                await member.lookups.wait_stable()
            case Step.GROUP_OFFSETS:
                # The empty name stands for the topic that the group commits its offsets under. It is a stand-in if the
                # source is on another cluster.
                attempt.group_offsets = [await self._group_offsets(numbers, topic) for topic in ("", *topics[1:])]
            case Step.CHANGELOG_RANGES:
                attempt.changelog, attempt.changelog_id = await self._changelog_range(numbers)
            case Step.INPUT_RANGES:
                attempt.logs = [await self._source_range(numbers, topic) for topic in topics]
                attempt.barrier_at = member.now()

    async def _advance(self, step: Step, one: PartitionStand, attempt: _Attempt) -> None:
        """Carry out a step of the partition at hand."""
        stand, number, worker = attempt.stand, one.number, attempt.workers[one.number]
        changelog = attempt.changelog[number]
        match step:
            case Step.CHECK:
                one.is_complete = self._replicas.reaches(number, _goal(changelog))
                one.looks_lost = one.is_complete and self._seems_lost(number, attempt.inputs(number))
            case Step.CHECK_END:
                one.is_alone = await self._end_of(number) == changelog[1]
            case Step.AWAIT_LOOKUPS:
                await self._await_lookups(worker, _goal(changelog))
                one.has_lookups = True
            case Step.FIND_MISSED:
                stands = {each.topic: (each.topic_id, each.range) for each in attempt.inputs(number)}
                try:
                    if self._beginnings is not None:
                        logs = {topic: log for topic, (_, log) in stands.items()}
                        await self._beginnings.find(worker, self._replicas.offset_record(number), logs)
                    attempt.missed[number] = await self._missed.find(worker, _goal(changelog), stands)
                    stand.searched.add(number)
                except BrokerUnavailable as error:
                    # Only this partition waits for another attempt. The others of the round are brought up before it.
                    attempt.failure, stand.is_unanswered = error, True
                    stand.pass_on()
            case Step.BRING_UP:
                copy = self._start(worker, attempt.inputs(number), changelog, attempt.ids, attempt.missed[number])
                if copy is None:
                    stand.pass_on()
                else:
                    stand.leave()
                    self._report(worker, copy, attempt)
            case Step.PASS_ON:
                stand.pass_on()
            case Step.LEAVE:
                stand.leave()
            case Step.GIVE_WAY:
                raise BrokerUnavailable(f"another member works on {worker.topic_partition}; asking again")

    async def _end_round(self, step: Step, attempt: _Attempt) -> None:
        """Wait for the next round, or end the attempt."""
        if step is Step.WAIT:
            # The wait has a limit: a copy that stands still makes no news, and the next round is what notices it.
            await self._replicas.changed.wait(STALLED_SECONDS)
            attempt.stand.begin_round()
        elif step is Step.CHECK_STALL:
            # A new attempt follows, and not a longer wait: a member that is gone may have begun a transaction behind
            # our fence, and only the next fence ends that before its timeout.
            await self.stalls.check(attempt.positions, attempt.moved_at)
            raise BrokerUnavailable(
                f"restoring makes no progress: {self._progress(attempt.stand.waiting, attempt.changelog)}"
            )
        else:
            assert attempt.failure is not None
            raise attempt.failure

    def _report(self, worker: PartitionWorker, copy: Replica, attempt: _Attempt) -> None:
        now, number = self._member.now(), worker.partition
        began, fenced, barrier = attempt.began_at, attempt.fenced_at, attempt.barrier_at
        self._partitions.restored[number] = copy.records, now - began
        times = fenced - began, barrier - fenced, now - barrier
        self._member.measure(TakeOverDone(number, worker.watermark, copy.records, *times, copy.warm))

    async def _group_offsets(self, numbers: list[int], topic: str) -> dict[int, int | None]:
        client, named = self._member.takeover_client, (topic,) if topic else ()
        # A pending commit that does not end may be one whose fence was missed: no longer than a restore may stall.
        deadline = self._member.now() + STALLED_SECONDS
        ask = client.stable_offsets if named else self.blocked.behind(client.stable_offsets)
        return await self._member.control.call(ask, numbers, deadline, *named)

    async def _changelog_range(self, numbers: list[int]) -> tuple[dict[int, Range], str]:
        member, changelog = self._member, self._config.changelog
        deadline = member.now() + STEP_SECONDS
        return await member.control.call(_identified_range, member.takeover_client, changelog, numbers, deadline)

    async def _source_range(self, numbers: list[int], topic: str) -> tuple[dict[int, Range], str]:
        member = self._member
        deadline = member.now() + STEP_SECONDS
        return await self._source.call(_identified_range, member.source_log, topic, numbers, deadline)

    async def _end_of(self, number: int) -> int:
        member, changelog = self._member, self._config.changelog
        ask, deadline = member.takeover_client.log_range, member.now() + STEP_SECONDS
        return (await member.control.call(ask, changelog, [number], deadline))[number][1]

    def _seems_lost(self, number: int, found: Sequence[InputStand]) -> bool:
        """Check whether the state that was read has no offset, or one whose records are deleted."""
        record = self._replicas.offset_record(number)
        if record is None:
            return found[0].group_offset is not None
        further = [record.position_in(one.topic, number) for one in found[1:]]
        offsets = record.offset, *[None if at is None else at[0] for at in further]
        return any(at is not None and at < one.range[0] for at, one in zip(offsets, found, strict=True))

    async def _await_lookups(self, worker: PartitionWorker, goal: int) -> None:
        """Wait for lookups that are not as far as the handlers of a restored partition have looked."""
        lookups, found = self._member.lookups, self._replicas.read(worker.partition, goal, lambda copy: None)
        if found is not None and not lookups.reach(found[0]):
            await lookups.wait_for(found[0], worker.topic_partition)

    def _start(
        self, worker: PartitionWorker, found: Sequence[InputStand], changelog: Range, ids: TopicIds, missed: Missed
    ) -> Replica | None:
        """Take a complete copy to work on; ``found`` of its inputs, the source's own topic first; ``missed`` by its
        joined tables. ``None``: it began anew, or the tail is putting records into it."""
        member, number = self._member, worker.partition
        lookups = member.lookups
        # The copy is compared once more, under the lock of the copies: the tail has read on since the round looked.
        copy = self._replicas.take(number, lambda copy: _fits(copy, changelog) and lookups.reach(copy.offset_record))
        if copy is None:
            if self._replicas.written_at(number) >= changelog[1]:
                raise BrokerUnavailable(f"another member works on {worker.topic_partition}; asking again")
            if self._replicas.failure(number) is not None:
                raise BrokerUnavailable(f"the state of {worker.topic_partition} cannot be read on; asking again")
            return None
        self._report_trimmed(copy, changelog)
        worker.adopt(copy)
        position = self._start_position(worker, found, ids)
        # The ids come before the first event: its offset record names the topics for which this partition was checked
        # (A2).
        worker.ids, worker.input_ids = ids, tuple(one.topic_id for one in found[1:])
        # This comes before the worker runs: its first event may be the one that stops the loop.
        self.blocked.meet(worker)
        self._partitions.activate(worker, position)
        record, begun = worker.offset_record, worker.joined.begun() + self._missed.delete(worker, missed)
        if record is None and self._beginnings is not None:
            begun.insert(0, self._beginnings.change(worker))
        is_new = (
            self._config.auto_offset_reset == "latest"
            if record is None
            else None in [record.position_in(one.topic, number) for one in found[1:]]
        )
        if begun or is_new:
            # The offset record is written at once, and not with the first event: a start that finds none begins at the
            # end of the log as it is then, and the records in between would never be handled.
            for start in range(0, len(begun) or 1, CHANGES_TOGETHER):
                member.pool.admit(number, worker.watermark, [], begun[start : start + CHANGES_TOGETHER])
        return copy

    def _report_trimmed(self, copy: Replica, changelog: Range) -> None:
        """Warn of a copy that was read from the log's start, if that is not 0. Compaction alone leaves it at 0: records
        were deleted. No error, since the state may be complete, and no command could accept it."""
        low, high = changelog
        if low > 0 and copy.start == FROM_START:
            _log.warning(
                "%s[%d]: the log starts at %d (end %d): records below it were deleted (DeleteRecords, or a "
                "cleanup.policy with delete), and keys that were written only there may be missing from the "
                "state. Restore the topic from a backup, or delete the changelog and the group's offsets to start over",
                self._config.changelog,
                copy.partition,
                low,
                high,
            )

    def _start_position(self, worker: PartitionWorker, found: Sequence[InputStand], ids: TopicIds) -> Position:
        """Return where the partition goes on, in all its inputs."""
        record, number = worker.offset_record, worker.partition
        if record is None:
            return position_of([self._start_offset(worker, one, None) for one in found])
        refuse_replaced(self._config, number, record.ids, ids)
        offsets = [self._start_offset(worker, found[0], record.offset)]
        for one in found[1:]:
            known = record.position_in(one.topic, number)
            if known is not None:
                refuse_replaced_input(self._config, one.topic, number, known[1], one.topic_id)
            offsets.append(self._start_offset(worker, one, None if known is None else known[0]))
        return position_of(offsets)

    def _progress(self, waiting: Collection[int], changelog: Mapping[int, Range]) -> str:
        copies = self._replicas
        stands = [f"[{number}] at {copies.position(number)} of {changelog[number][1]}" for number in sorted(waiting)]
        return ", ".join(stands[:5]) + (f" and {len(stands) - 5} more" if len(stands) > 5 else "")

    def _start_offset(self, worker: PartitionWorker, found: InputStand, known: int | None) -> int:
        """Return the offset where the partition goes on in an input: ``known`` from the changelog; for a new one by
        ``auto_offset_reset``."""
        config, tp = self._config, TopicPartition(found.topic, worker.partition)
        group_offset, (low, high) = found.group_offset, found.range
        if known is None:
            if group_offset is not None:
                lost = "the changelog was deleted, or another program uses the group"
                then = (
                    "; or, to go on where that program has stopped, with an empty state, run `kes offsets start "
                    f"MODULE:SOURCE --from-group {config.group_id}`"
                )
                if worker.offset_record is not None:
                    lost = "a release that knows one input only was at work, or another program uses the group"
                    then = f" with it, by auto_offset_reset={config.auto_offset_reset!r}: the state stays as it is"
                raise OffsetError(
                    f"{tp}: the group {config.group_id} has committed offset {group_offset}, but the changelog "
                    f"{config.changelog}[{worker.partition}] holds no offset of {found.topic}: {lost}. Restore the "
                    f"changelog, or delete the group's offsets of {found.topic} to start over{then}"
                )
            is_own = found.topic in config.own_inputs  # others may have sent to it already
            if is_own or worker.joined.begin(found.topic, low, high):
                return low
            if config.auto_offset_reset == "error" and found.topic not in worker.started_at:
                raise OffsetError(f"{tp}: no offset is committed, and auto_offset_reset is 'error'")
            # A restart keeps the first answer: the end has moved on since, over records that were not handled.
            return worker.started_at.setdefault(found.topic, low if config.auto_offset_reset == "earliest" else high)
        # There is no reset to what is there: the lost records would be missing from the state, unnoticed.
        if not low <= known <= high:
            lost = f"records {known} to {low - 1} are gone" if known < low else f"it ends at {high}"
            raise OffsetError(
                f"{tp}: the state in {config.changelog}[{worker.partition}] goes on at offset {known}, but "
                f"{lost} (log start {low}, end {high}). Restore the topic, or delete the changelog and the group's "
                "offsets to start over"
            )
        # One transaction commits both offsets, so the group is behind or has none, but never ahead (A3). Going on from
        # the changelog would send the outputs in between twice.
        if group_offset is not None and group_offset > known:
            accept = f"run `kes offsets accept MODULE:SOURCE --partition {worker.partition}`"
            raise OffsetError(
                f"{tp}: the group {config.group_id} has committed offset {group_offset}, but the state in "
                f"{config.changelog}[{worker.partition}] goes on at offset {known}: the changelog lost "
                "records, or the group's offset was set by hand. Restore the changelog; or, to have records "
                f"{known} to {group_offset - 1} handled again (their outputs appear a second time), stop all "
                f"members and {accept}"
            )
        if group_offset != known:
            self._member.measure(OffsetMismatch(worker.partition, -1 if group_offset is None else group_offset, known))
            _log.warning(
                "%s: the group's committed offset is %s, the changelog's %d; the changelog is right (a coordinator "
                "lost its memory, offsets expired, or an offset was set back by hand, which has no effect on a source "
                "with state)",
                tp,
                "missing" if group_offset is None else group_offset,
                known,
            )
        return known


def _identified_range(
    questions: TakeOver | SourceLog, topic: str, partitions: Collection[int], deadline: float
) -> tuple[dict[int, Range], str]:
    """Return the ranges of these partitions, and the id of the topic that they belong to. Blocks."""
    before = questions.identity(topic, deadline)
    ranges = questions.log_range(topic, partitions, deadline)
    # Requested before and after: the offsets of a new topic must not pass for those of the old one, nor the reverse.
    after = questions.identity(topic, deadline)
    if before.topic_id != after.topic_id:
        raise BrokerUnavailable(f"topic {topic} was created again between two requests; asking again")
    return ranges, after.topic_id


def _goal(changelog: Range) -> int:
    """Return the position that a copy must have reached."""
    low, high = changelog
    return high if low < high else FROM_START


def _fits(copy: Replica, changelog: Range) -> bool:
    """Check for a copy that has all of the changelog, and nothing that was written after its end was looked up: by a
    member that works in our place."""
    return copy.position >= _goal(changelog) and copy.last < changelog[1]
