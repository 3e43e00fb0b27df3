"""A muted source in a driver, beside a source that only its changelog is known of: OLD, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from streams import EventSource, EventSourceConfig, Table, event_type
from streams.core.timers import Timer
from streams.runtime.changelog import (
    MUTED,
    OFFSET_KEY,
    VOICE_KEY,
    BeginRecord,
    OffsetRecord,
    VoiceRecord,
    beginning,
    encode_timer,
    further_positions,
    timer_key,
)
from streams.runtime.partition.event_context import EventContext
from streams.testing import TestDriver

BROKEN = 13
"""An amount whose event fails as long as it is not in ``HEALED``."""
HEALED: set[int] = set()
OLD, NEW, TOPIC, OUT, OLDS = "bank", "bank.v2", "deposits", "totals", "bank.deposits.changelog"


@event_type("Deposit")
class Deposit(msgspec.Struct, frozen=True):
    account: str
    amount: int
    remind: int = 0
    """Seconds until a reminder; 0: none."""


@event_type("Remind")
class Remind(msgspec.Struct, frozen=True):
    account: str


@event_type("Total")
class TotalNow(msgspec.Struct, frozen=True):
    account: str
    total: int


def build(partitions: int = 1, inputs: tuple[str, ...] = (), **more: Any) -> EventSource[Table[str, int]]:
    """A source that counts, and reminds; ``seen``: what its handlers were called with."""
    settings = {"group_id": NEW, "shadow_of": OLD, **more}
    config = EventSourceConfig(topic=TOPIC, num_partitions=partitions, **settings)
    source = EventSource(config, Table.factory(key=str, value=int))
    for topic in inputs:
        source.input(topic)

    @source.register_event_type(Deposit)
    def deposit(ctx: EventContext[Table[str, int]], event: Deposit) -> None:
        if event.amount == BROKEN and BROKEN not in HEALED:
            raise RuntimeError("not yet")
        total = ctx.store.get(event.account, 0) + event.amount
        ctx.store.put(event.account, total)
        ctx.forward(OUT, TotalNow(event.account, total), key=event.account)
        if event.remind:
            ctx.schedule_in(event.remind, Remind(event.account), name=event.account)
        if event.amount < 0:
            ctx.cancel_timer(event.account)

    @source.register_event_type(Remind)
    def remind(ctx: EventContext[Table[str, int]], event: Remind) -> None:
        ctx.store.put(f"{event.account} reminded", ctx.store.get(f"{event.account} reminded", 0) + 1)
        ctx.forward(OUT, TotalNow(event.account, -1), key=event.account)

    return source


class Beside:
    """OLD beside a driver of NEW."""

    def __init__(self, driver: TestDriver[Any]) -> None:
        self.driver, self.broker = driver, driver._world.broker
        self.config = driver._world.config

    def id_of(self, topic: str) -> str:
        return self.broker.identity(topic).topic_id

    def mute(self, *, voice: bool = True, mark: bool = True, group: str = OLD) -> None:
        """Begin NEW, as ``kes rebuild start`` does."""
        config, broker = self.config, self.broker
        topics = [config.topic, *self.driver._world.inputs_read]
        ids = {topic: self.id_of(topic) for topic in topics}
        for number in range(config.num_partitions):
            began = BeginRecord(how="rebuild", at=dict.fromkeys(topics, 0), places={}, by="kit", at_ms=1)
            own = self.id_of(config.changelog)
            begin, position = beginning(began, number, ids, MUTED + own if mark else own)
            told = VoiceRecord(group=group, changelog=OLDS, changelog_id=self.id_of(OLDS), by="kit", at_ms=1)
            pairs = [begin, (VOICE_KEY, msgspec.json.encode(told)), position]
            for key, value in pairs if voice else (begin, position):
                broker.append(config.changelog, number, key, value, None)
            for topic in topics:
                broker.offsets[broker.offset_key(topic, number)] = 0

    def at(self, offset: int, partition: int = 0, further: Mapping[str, int] | None = None) -> None:
        """OLD commits this position."""
        carried: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
        if further:
            ids = {topic: (at, self.id_of(topic)) for topic, at in further.items()}
            carried = further_positions(None, partition, ids)
        record = OffsetRecord(offset, "old", 0, 0, self.id_of(self.config.topic), self.id_of(OLDS), carried)
        self.broker.append(OLDS, partition, OFFSET_KEY, msgspec.json.encode(record), None)

    def timer(self, name: str, due_ms: int | None, by: int = 0) -> None:
        """OLD has this timer, or (``None``) has it no more."""
        value = None if due_ms is None else encode_timer(Timer(name, due_ms, "Remind", b"{}", by=by))
        self.broker.append(OLDS, 0, timer_key(name), value, None)

    def voice(self) -> None:
        """OLD is muted itself."""
        told = VoiceRecord(group="older", changelog="older", changelog_id="x", by="kit", at_ms=1)
        self.broker.append(OLDS, 0, VOICE_KEY, msgspec.json.encode(told), None)
