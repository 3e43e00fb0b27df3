"""Requests to a simulated broker in bytes, without a network between."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from streams.kafka.wire.codec import decode_answer, encode
from streams.kafka.wire.message import is_flexible
from streams.kafka.wire.schemas.heartbeat import HeartbeatRequest
from streams.kafka.wire.schemas.join_group import JoinGroupRequest
from streams.kafka.wire.schemas.leave_group import LeaveGroupRequest
from streams.kafka.wire.schemas.sync_group import SyncGroupRequest
from streams.testing.simulation.broker import Broker
from streams.testing.simulation.faults import Strike
from streams.testing.simulation.virtual_time import VirtualTimeLoop
from streams.testing.simulation.wire_broker import WireBroker
from streams.testing.simulation.wire_groups import WireGroups
from streams.testing.simulation.wire_questions import WireQuestions
from streams.testing.simulation.wire_requests import Request

T = TypeVar("T")
GROUP = "group"


def frame_of(request: Any, version: int, number: int = 7) -> bytes:
    """Encode a request, without its size."""
    name = b"asker"
    head = struct.pack(">hhih", request.API_KEY, version, number, len(name)) + name
    tags = b"\0" if is_flexible(type(request), version) else b""
    return head + tags + encode(request, version)


class Asker:
    """A broker of its own, and what asks it."""

    def __init__(self, loop: VirtualTimeLoop, *, nodes: int = 1, **options: Any) -> None:
        self.loop = loop
        self.broker = Broker(loop, random.Random(0), 4)
        self.wire = WireBroker(self.broker, nodes=nodes)
        self.groups = WireGroups(self.wire, GROUP, changelog="changelog", **options)
        WireQuestions(self.wire)

    async def ask(self, request: Any, version: int, *, node: int | None = None, strike: Strike | None = None) -> Any:
        """Ask the node that coordinates the group, unless another one is named."""
        taken = Request(frame_of(request, version))
        at = self.wire.node_of(GROUP) if node is None else node
        answer = self.wire.answer(at, "host", taken, strike)
        data = answer if isinstance(answer, bytes) else await answer
        return decode_answer(request, version, data[4:])

    async def join(
        self, member: str = "", *protocols: tuple[str, bytes], version: int = 9, session: float = 10.0,
        rebalance: float = 15.0, strike: Strike | None = None, **fields: Any,
    ) -> Any:  # fmt: skip
        """Send a JoinGroup as it is, without the second one for a member id."""
        kind = JoinGroupRequest
        of = kind.JoinGroupRequestProtocol
        request = kind(
            **{
                "group_id": GROUP,
                "session_timeout_ms": int(session * 1000),
                "rebalance_timeout_ms": int(rebalance * 1000),
                "member_id": member,
                "group_instance_id": None,
                "protocol_type": "consumer",
                "protocols": [of(name=name, metadata=data) for name, data in protocols or (("a", b"1"),)],
                "reason": None,
                **fields,
            },
        )
        return await self.ask(request, version, strike=strike)

    async def sync(self, member: str, generation: int, plan: dict[str, bytes], version: int = 5, **fields: Any) -> Any:
        """Send a SyncGroup."""
        kind = SyncGroupRequest
        of = kind.SyncGroupRequestAssignment
        request = kind(
            group_id=GROUP,
            generation_id=generation,
            member_id=member,
            assignments=[of(member_id=name, assignment=data) for name, data in plan.items()],
            **{"group_instance_id": None, "protocol_type": "consumer", "protocol_name": None, **fields},
        )
        return await self.ask(request, version)

    async def heartbeat(self, member: str, generation: int, instance: str | None = None, version: int = 4) -> int:
        """Send a heartbeat: its code."""
        kind = HeartbeatRequest
        request = kind(
            group_id=GROUP,
            generation_id=generation,
            member_id=member,
            group_instance_id=instance,
        )
        return int((await self.ask(request, version)).error_code)

    async def leave(self, member: str, instance: str | None = None, version: int = 5) -> int:
        """Send a LeaveGroup: the code of the member."""
        kind = LeaveGroupRequest
        leaver = kind.MemberIdentity(member_id=member, group_instance_id=instance, reason=None)
        answer = await self.ask(kind(group_id=GROUP, member_id=member, members=[leaver]), version)
        return int(answer.error_code or (answer.members[0].error_code if answer.members else 0))

    async def member(self, *protocols: tuple[str, bytes], **fields: Any) -> Any:
        """Join as a new member, whose id is given first, and wait for the generation."""
        first = await self.join("", *protocols, **fields)
        assert first.error_code == 79, first
        return await self.join(first.member_id, *protocols, **fields)


def run(script: Callable[[VirtualTimeLoop], Coroutine[Any, Any, T]], seconds: float = 10_000.0) -> T:
    """Run a script in virtual time."""
    loop = VirtualTimeLoop(seconds)
    asyncio.set_event_loop(loop)
    try:
        loop.main = main = loop.create_task(script(loop))
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()
