"""The group coordinators of the simulated broker in bytes: joins, heartbeats, and offsets outside of transactions.

The rules of a group are those of ``classic_group``. The broker has the offsets of one group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

from streams.testing.simulation.broker import Broker, Refuses
from streams.testing.simulation.classic_group import ClassicGroup, Joined, Joining, State, Synced, settle
from streams.testing.simulation.faults import Strike
from streams.testing.simulation.wire_broker import Answer, WireBroker
from streams.testing.simulation.wire_requests import Request

_ID_FIRST: Final = 4  # the version of JoinGroup from which on new members are given their id first
_NULLABLE_PROTOCOL: Final = 7  # of JoinGroup: before it, no protocol is an empty name
_LEAVES: Final = 3  # the version of LeaveGroup from which on several members leave at once
_BY_GROUPS: Final = 8  # the version of OffsetFetch from which on it asks for several groups
_INVALID_GROUP_ID, _INVALID_SESSION, _UNSTABLE = 24, 26, 88
_CODES: Final = {22: "ILLEGAL_GENERATION", 25: "UNKNOWN_MEMBER_ID", 82: "FENCED_INSTANCE_ID"}

T = TypeVar("T")


class WireGroups:
    """``changelog``: the topic whose notes the group keeps (``group.TakeOver.note``). ``sessions``: the shortest and
    the longest that members may have, in seconds. ``initial_delay``: see ``ClassicGroup``."""

    def __init__(
        self,
        wire: WireBroker,
        group_id: str,
        *,
        changelog: str = "",
        sessions: tuple[float, float] = (6.0, 1800.0),
        initial_delay: float = 0.0,
    ) -> None:
        self._wire, self._changelog, self._sessions, self._delay = wire, changelog, sessions, initial_delay
        self._broker: Broker = wire.broker
        self.groups: dict[str, ClassicGroup] = {}
        self.group = self._group(group_id)
        """The group whose offsets the broker has."""
        self.on_plan: Callable[[ClassicGroup], None] = lambda group: None
        """Called when the leader's plan has come."""
        self._broker.check_member = self._check_in_transaction
        wire.on_move = self._moved
        wire.serve(
            {
                "JoinGroup": self._join,
                "SyncGroup": self._sync,
                "Heartbeat": self._heartbeat,
                "LeaveGroup": self._leave,
                "OffsetCommit": self._commit,
                "OffsetFetch": self._fetch,
            }
        )

    def forget(self) -> None:
        """Restart the coordinators without their log: members, generations, offsets and notes are gone."""
        for group in self.groups.values():
            group.forget()
        self._broker.offsets.clear()
        self._broker.notes.clear()

    def _group(self, group_id: str) -> ClassicGroup:
        found = self.groups.get(group_id)
        if found is None:
            found = self.groups[group_id] = ClassicGroup(self._broker.loop, initial_delay=self._delay)
        return found

    def _moved(self, name: str) -> None:
        if name in self.groups:
            self.groups[name].moved()

    def _check_in_transaction(self, generation: int, member: str) -> None:
        if code := self.group.commits(member, generation, in_transaction=True):
            self._broker.met.add(_CODES[code])
            raise Refuses(_CODES[code], "lost")

    # -- members -------------------------------------------------------------------------------------------------------

    def _join(self, node: int, request: Request, strike: Strike | None) -> Answer:
        body = request.body
        code = self._refused(body.group_id, node, strike)
        shortest, longest = self._sessions
        if not code and not shortest <= body.session_timeout_ms / 1000 <= longest:
            code = _INVALID_SESSION
        if code:
            return self._joined(request, Joined(code, body.member_id))
        joining = Joining(
            member=body.member_id,
            protocols={each.name: bytes(each.metadata) for each in body.protocols},
            session=body.session_timeout_ms / 1000,
            rebalance=(body.rebalance_timeout_ms if request.version else body.session_timeout_ms) / 1000,
            instance=body.group_instance_id,
            protocol_type=body.protocol_type,
            needs_id=request.version >= _ID_FIRST,
        )
        return self._later(
            self._group(body.group_id).join(joining), lambda answer: self._joined(request, answer, body.protocol_type)
        )

    @staticmethod
    def _joined(request: Request, answer: Joined, protocol_type: str | None = None) -> bytes:
        of = request.answer_class.JoinGroupResponseMember
        return request.encoded(
            error_code=answer.code,
            generation_id=answer.generation,
            protocol_type=None if answer.code else protocol_type,
            protocol_name=answer.protocol if request.version >= _NULLABLE_PROTOCOL else answer.protocol or "",
            leader=answer.leader,
            skip_assignment=answer.skips_assignment,
            member_id=answer.member,
            members=[
                of(member_id=member, group_instance_id=instance, metadata=metadata)
                for member, instance, metadata in answer.members
            ],
        )

    def _sync(self, node: int, request: Request, strike: Strike | None) -> Answer:
        body = request.body
        if code := self._refused(body.group_id, node, strike):
            return self._synced(request, Synced(code))
        plan = {each.member_id: bytes(each.assignment) for each in body.assignments}
        group = self._group(body.group_id)
        before = group.state
        answer = group.sync(body.member_id, body.generation_id, plan, body.group_instance_id, body.protocol_name)
        if before is not State.STABLE and group.state is State.STABLE:
            self.on_plan(group)
        return self._later(answer, lambda synced: self._synced(request, synced, body.protocol_type))

    @staticmethod
    def _synced(request: Request, answer: Synced, protocol_type: str | None = None) -> bytes:
        return request.encoded(
            error_code=answer.code,
            protocol_type=None if answer.code else protocol_type,
            protocol_name=answer.protocol,
            assignment=answer.assignment,
        )

    def _heartbeat(self, node: int, request: Request, strike: Strike | None) -> Answer:
        body = request.body
        code = self._refused(body.group_id, node, strike) or self._group(body.group_id).heartbeat(
            body.member_id, body.generation_id, body.group_instance_id
        )
        return request.encoded(error_code=code)

    def _leave(self, node: int, request: Request, strike: Strike | None) -> Answer:
        body = request.body
        if code := self._refused(body.group_id, node, strike):
            return request.encoded(error_code=code, members=[])
        group = self._group(body.group_id)
        if request.version < _LEAVES:
            return request.encoded(error_code=group.leave(body.member_id), members=[])
        of = request.answer_class.MemberResponse
        members = [
            of(
                member_id=each.member_id,
                group_instance_id=each.group_instance_id,
                error_code=group.leave(each.member_id, each.group_instance_id),
            )
            for each in body.members
        ]
        return request.encoded(error_code=0, members=members)

    # -- offsets -------------------------------------------------------------------------------------------------------

    def _commit(self, node: int, request: Request, strike: Strike | None) -> Answer:
        body = request.body
        code = self._refused(body.group_id, node, strike) or self._group(body.group_id).commits(
            body.member_id, body.generation_id_or_member_epoch, body.group_instance_id
        )
        of = request.answer_class.OffsetCommitResponseTopic
        topics = []
        for topic in body.topics:
            for part in topic.partitions if not code else ():
                self._write(topic.name, part.partition_index, part.committed_offset, part.committed_metadata or "")
            partitions = [
                of.OffsetCommitResponsePartition(partition_index=part.partition_index, error_code=code)
                for part in topic.partitions
            ]
            topics.append(of(name=topic.name, partitions=partitions))
        return request.encoded(topics=topics)

    def _write(self, topic: str, partition: int, offset: int, metadata: str) -> None:
        if topic == self._changelog:
            self._broker.notes[partition] = metadata
        else:
            self._broker.offsets[self._broker.offset_key(topic, partition)] = offset

    def _fetch(self, node: int, request: Request, strike: Strike | None) -> Answer:
        answer = request.answer_class
        if request.version < _BY_GROUPS:
            topic_of = answer.OffsetFetchResponseTopic
            code = self._refused(request.body.group_id, node, strike)
            topics = self._offsets(request, request.body.topics, code, topic_of, topic_of.OffsetFetchResponsePartition)
            return request.encoded(topics=topics, error_code=code)
        of = answer.OffsetFetchResponseGroup
        topic_of = of.OffsetFetchResponseTopics
        groups = []
        for group in request.body.groups:
            code = self._refused(group.group_id, node, strike)
            topics = self._offsets(request, group.topics, code, topic_of, topic_of.OffsetFetchResponsePartitions)
            groups.append(of(group_id=group.group_id, topics=topics, error_code=code))
        return request.encoded(groups=groups)

    def _offsets(
        self, request: Request, topics: list[Any] | None, code: int, topic_of: Any, partition_of: Any
    ) -> list[Any]:
        if code:
            return []
        if topics is None:
            raise NotImplementedError("OffsetFetch of all topics")
        return [
            topic_of(
                name=topic.name,
                partitions=[
                    partition_of(partition_index=number, **self._entry(topic.name, number, self._is_stable(request)))
                    for number in topic.partition_indexes
                ],
            )
            for topic in topics
        ]

    @staticmethod
    def _is_stable(request: Request) -> bool:
        return bool(getattr(request.body, "require_stable", False))

    def _entry(self, topic: str, partition: int, stable: bool) -> dict[str, Any]:
        """Return offset, metadata and code of one partition: -1 where nothing is committed."""
        broker = self._broker
        if topic == self._changelog:
            note = broker.notes.get(partition, "")
            return {"committed_offset": 0 if note else -1, "metadata": note, "error_code": 0}
        if stable and broker.stable_offsets([partition], topic) is None:
            return {"committed_offset": -1, "metadata": "", "error_code": _UNSTABLE}
        offset = broker.offsets.get(broker.offset_key(topic, partition), -1)
        return {"committed_offset": offset, "metadata": "", "error_code": 0}

    # -- both ----------------------------------------------------------------------------------------------------------

    def _refused(self, group_id: str, node: int, strike: Strike | None) -> int:
        return self._wire.not_here(group_id, node, strike) if group_id else _INVALID_GROUP_ID

    def _later(self, waited: asyncio.Future[T], encode: Callable[[T], bytes]) -> Answer:
        if waited.done():
            return encode(waited.result())
        answer: asyncio.Future[bytes] = self._broker.loop.create_future()
        waited.add_done_callback(lambda done: settle(answer, encode(done.result())))
        return answer
