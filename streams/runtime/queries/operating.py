"""Operators' requests to the owner of a partition, as they travel, and its answers: what all kinds of them share."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

import msgspec

from streams.errors import ConfigError, NotOwned
from streams.runtime.engine import Engine
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.interjections import Proof
from streams.runtime.partition.worker import PartitionWorker

_log = logging.getLogger(__name__)

PAGE: Final = 200
"""Entries of one answer, or of one act, at most."""
Named = tuple[str, int, int]
"""What an act on one entry names: its name, and what tells it from an earlier or a later one of that name."""


class OperatorReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``more``: entries come behind the last one of a list. ``done``: the names of those on which an act was carried
    out; the others are other ones by now."""

    partition: int
    served_by: str
    more: bool = False
    done: tuple[str, ...] = ()


R = TypeVar("R", bound=OperatorReply)


class OperatorRequest(
    msgspec.Struct, Generic[R], frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """``action``: ``list``, or one of ``actions``. ``after``: list those behind this place. ``seen``: the entries that
    an act is meant for. ``noun``: what they are called."""

    path: ClassVar[str]
    noun: ClassVar[str]
    actions: ClassVar[Collection[str]]
    max_staleness: ClassVar[None] = None  # a copy has nothing to act on

    group: str
    partition: int
    action: str = "list"
    after: str = ""
    seen: tuple[Named, ...] = ()
    timeout_seconds: float = 5.0

    @property
    def title(self) -> str:
        """Return the act, as the log names it."""
        return self.action

    def checked(self, group: str, partitions: int) -> Self:
        """Return the request, which comes from outside. Raises ``ConfigError``."""
        if self.group != group:
            raise ConfigError(f"the request is for the group {self.group!r}, and this is {group!r}")
        if self.action not in ("list", *self.actions):
            raise ConfigError(f"the action is {self.action!r}; there are list, {', '.join(self.actions)}")
        if not 0 <= self.partition < partitions:
            raise ConfigError(f"partition {self.partition}: there are 0 to {partitions - 1}")
        if (self.action == "list") is not (not self.seen) or len(self.seen) > PAGE:
            raise ConfigError(f"an act names the {self.noun}s that it is meant for, {PAGE} at most; a list names none")
        names = [name for name, _, _ in self.seen]
        if len(set(names)) < len(names):  # it would be carried out twice
            raise ConfigError(f"an act names each {self.noun} once")
        self.check_own(names)
        return self

    def check_own(self, names: list[str]) -> None:
        """Check the fields of this kind; ``names``: of what an act is meant for. Raises ``ConfigError``."""
        raise NotImplementedError

    def carry_out(self, ctx: EventContext[Any], worker: PartitionWorker) -> R:
        """Answer in an interjection of the owner."""
        raise NotImplementedError


async def answered(engine: Engine, request: OperatorRequest[R]) -> R:
    """Answer a request that was checked, on the loop of the source: a list by the lease or a commit, an act when its
    transaction is committed. Raises ``NotOwned``, ``MembershipLost``, ``Stopped``, and ``ConfigError`` where acts are
    not allowed."""
    number, config = request.partition, engine.config
    worker = engine.workers.get(number)
    if worker is None or not worker.takes_interjections:  # before the right: another member may have it
        raise NotOwned(f"{config.topic}[{number}] is not active on this member")
    is_list = request.action == "list"
    if not (is_list or config.queries.operate):
        raise ConfigError("this member does not take operators' acts: QueryConfig.operate is not set")

    def act(ctx: EventContext[Any]) -> R:
        return request.carry_out(ctx, worker)

    # An act that changes nothing is proven as well: only the owner may say that what was meant is another one by now.
    reply: R = await engine.ad_hoc.interject(
        number, act, blocking=False, proof=Proof.LEASE if is_list else Proof.HEARTBEAT
    )
    if not is_list:
        text = "%s[%d]: an operator's %s is committed for %d of %d %s(s): %s"
        names = ", ".join(map(repr, reply.done[:10])) or "they are other ones by now"
        _log.warning(text, config.topic, number, request.title, len(reply.done), len(request.seen), request.noun, names)
    return reply
