"""Event classes by a schema registry, which the workers import; the registry's address is known in the driver only.

Their names and subjects are their own: a source in this process that has the same ones would ask this registry.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec

from streams import EventSource, EventSourceConfig
from streams.events import event_type
from streams.formats import AvroCodec, BySchema, JsonSchemaCodec, SchemaRegistry

REGISTRY = SchemaRegistry()  # KES_REGISTRY_URL


@event_type("sent.Deposited", codec=AvroCodec(REGISTRY, subject="sent-deposits-value"))
class Deposited(msgspec.Struct, frozen=True):
    account: str
    cents: int
    at: dt.datetime | None = None
    tags: list[str] = []


@event_type("sent.Balance", codec=JsonSchemaCodec(REGISTRY, subject="sent-balances-value"))
class Balance(msgspec.Struct, frozen=True):
    account: str
    cents: int


@event_type("sent.Read", codec=AvroCodec(REGISTRY))
class Read(msgspec.Struct, frozen=True):
    """Is read only."""

    account: str


config = EventSourceConfig(group_id="bank", topic="deposits", num_partitions=4)
source = EventSource(config, types=BySchema(REGISTRY, subjects=["sent-deposits-value"]))


@source.on
def deposited(ctx: Any, event: Deposited) -> None:
    ctx.forward("balances", Balance(event.account, event.cents), key=event.account)
