"""The account workload in one process, driven by stand-ins for broker and clients, by each way to read and write it.

``python -m benchmarks.formats.ways WAY EVENTS`` prints microseconds of processor time per event, or per row of a page.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import msgspec
from confluent_kafka import Message

from benchmarks import handwritten
from benchmarks.engine import without_handlers
from benchmarks.instructions import drive, scripted
from benchmarks.workload import Account, Balance, Deposited, Job
from streams import EventContext, EventSource, Index, NamedTable, Stores, Table, TopicPartition, event_type
from streams.events import event_type_of
from streams.formats import AvroCodec, ByField, CloudEvents, Only, SchemaRegistry
from streams.model.round_trips import Risk
from streams.runtime.queries.questions import PAGE, Question, Reply, TurnRows, encode_bounds, read_of
from streams.sak.murmur2 import partition_of
from streams.testing.fake_registry import FakeRegistry

Value = Callable[[Deposited], tuple[bytes, Sequence[tuple[str, bytes]]]]
_TYPE: Final = [("__grt__", b"Deposited")]
_ATTRIBUTES: Final = [("ce_id", b"1"), ("ce_source", b"/"), ("ce_specversion", b"1.0"), ("ce_type", b"Deposited")]
_REGISTRY: Final = SchemaRegistry(client=(_FAKE := FakeRegistry()))


@event_type("AvroDeposited", codec=AvroCodec(_REGISTRY, subject="in"))
class AvroDeposited(msgspec.Struct, frozen=True):
    account: str
    cents: int
    sent: float
    note: str


@event_type("AvroBalance", codec=AvroCodec(_REGISTRY, subject="out"))
class AvroBalance(msgspec.Struct, frozen=True):
    account: str
    count: int
    cents: int
    sent: float


def _codec(cls: type) -> Any:
    codec: Any = event_type_of(cls).codec
    return codec


_FAKE.register_declared()
for _cls in (AvroDeposited, AvroBalance):
    _codec(_cls).prepare()


class _Second:
    """Takes the processor time of all threads."""

    began = ended = 0.0

    def begin(self) -> None:
        self.began = self.began or time.process_time()

    def end(self) -> None:
        self.ended = time.process_time()


def in_json(event: Deposited) -> tuple[bytes, Sequence[tuple[str, bytes]]]:
    """Make a value of 200 bytes, whose first field says the type as well."""
    plain = {"kind": "deposited", **msgspec.structs.asdict(event), "more": "m" * 16}
    return msgspec.json.encode(plain), _TYPE


def of_cloud(event: Deposited) -> tuple[bytes, Sequence[tuple[str, bytes]]]:
    return in_json(event)[0], _ATTRIBUTES


def in_avro(event: Deposited) -> tuple[bytes, Sequence[tuple[str, bytes]]]:
    value = AvroDeposited(*msgspec.structs.astuple(event))
    return event_type_of(AvroDeposited).encode(value), [("__grt__", b"AvroDeposited")]


def messages_of(value: Value) -> Callable[..., dict[str, list[Message]]]:
    """Return the messages of ``scripted`` with other values and headers."""

    def made(count: int, *_: Any) -> dict[str, list[Message]]:
        found: dict[str, list[Message]] = {}
        for topic, messages in scripted.messages(count).items():
            found[topic] = []
            for one in messages:
                data, headers = value(msgspec.json.decode(one.value() or b"", type=Deposited))
                found[topic].append(
                    Message(
                        topic=topic, partition=one.partition(), offset=one.offset(), key=one.key(), value=data,
                        headers=list(headers), timestamp=one.timestamp(),
                    )
                )  # fmt: skip
        return found

    return made


def source_of(job: Job, event: Any, balance: Any, checked: bool, partitioner: Any, **more: Any) -> EventSource[Any]:
    """Build the event source of the account workload, with these classes and settings."""
    store = Table.factory(key=str, value=Account, checked=checked)
    source: EventSource[Any] = EventSource(without_handlers(job).config, store=store, **more)
    source.output(job.output, partitioner=partitioner)

    def deposited(ctx: EventContext[Any], event: Any) -> None:
        key = event.account
        account = ctx.store.get(key) or Account()
        account.count += 1
        account.cents += event.cents
        ctx.store.put(key, account)
        ctx.forward(job.output, balance(key, account.count, account.cents, event.sent), key=key)

    source.register_event_type(event)(deposited)
    return source


def by_engine(
    events: int,
    value: Value = in_json,
    classes: tuple[Any, Any] = (Deposited, Balance),
    checked: bool = False,
    partitioner: Any = "murmur2",
    **more: Any,
) -> float:
    """Drive the engine: microseconds of an event."""
    meter = _Second()
    with mock.patch.object(drive, "messages", messages_of(value)):
        made = lambda job: source_of(job, *classes, checked, partitioner, **more)  # noqa: E731
        drive.by_engine(made, meter, events, events)
    return (meter.ended - meter.began) * 1e6 / events


def without_suspicion(events: int) -> float:
    """Drive it with codecs that take every value for one that comes back."""
    with mock.patch("streams.codecs.risk_of", return_value=Risk()):
        return by_engine(events)


def by_hand(events: int) -> float:
    """The loop written by hand, with Confluent's serializers: microseconds of an event."""
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
    from confluent_kafka.serialization import MessageField, SerializationContext

    client = SchemaRegistryClient.new_client({"url": "mock://bench"})
    came, went = (SerializationContext(topic, MessageField.VALUE) for topic in ("in", "out"))
    schemas = [_codec(cls).schema.text for cls in (AvroDeposited, AvroBalance)]
    write_in, write_out = (AvroSerializer(client, schema) for schema in schemas)
    read = AvroDeserializer(client)
    plain = handwritten._encode

    def encode(value: Any) -> bytes:
        return write_out(msgspec.structs.asdict(value), went) if isinstance(value, Balance) else plain(value)

    class Loop(handwritten.Loop):
        def __init__(self, job: Job) -> None:
            super().__init__(job)
            self.decoders = {b"Deposited": lambda value: Deposited(**read(value, came))}

    meter, value = _Second(), lambda event: (write_in(msgspec.structs.asdict(event), came), _TYPE)
    with (
        mock.patch.object(drive, "messages", messages_of(value)),
        mock.patch.object(handwritten, "Loop", Loop),
        mock.patch.object(handwritten, "_encode", encode),
    ):
        drive.by_hand(meter, events, events)
    return (meter.ended - meter.began) * 1e6 / events


class Shop(Stores):
    """What pages are read from."""

    orders = NamedTable.of(str, Account, ordered=True, index={"cents": Index(int, lambda order: order.cents)})


def page(rows: int, **wanted: Any) -> float:
    """Answer with all rows, in pages, as a member does: microseconds of a row."""
    store = Shop.factory()(TopicPartition("in", 0))
    store.begin([])
    for number in range(rows):
        store.orders.put(f"order-{number * 7919 % rows:07}", Account(1, number))
    store.end()
    began, found, after = time.process_time(), 0, None
    while found < rows:
        turn: Any = read_of(Question(group="g", kind="range", partition=0, after=after, **wanted), store)
        assert isinstance(turn, TurnRows)
        found += len(turn.rows)
        after = turn.places[-1] if turn.places else turn.rows[-1][0]
        common: dict[str, Any] = {"partition": 0, "positions": (), "age_seconds": 0.0, "served_by": "w"}
        msgspec.json.encode(Reply(**common, rows=tuple(turn.rows), places=tuple(turn.places), more=turn.more))
    return (time.process_time() - began) * 1e6 / rows


_BY: Final = {"index": "cents", "bounds": encode_bounds(None, None, False), "limit": PAGE}
HEADER, BARE, CHECKED = "our header", "no value is suspicious", "checked=True"
ONLY, FIELD, CLOUD = "Only", "ByField", "CloudEvents"
AVRO, AVRO_BY_HAND = "Avro", "Avro by hand, Confluent's serializers"
CRC32, FUNCTION = "crc32", "a partitioner in Python"
RANGE, INDEX = "a row of range", "a row of by_range"
WAYS: Final[Mapping[str, Callable[[int], float]]] = {
    HEADER: by_engine,
    BARE: without_suspicion,
    CHECKED: lambda events: by_engine(events, checked=True),
    ONLY: lambda events: by_engine(events, types=Only(Deposited)),
    FIELD: lambda events: by_engine(events, types=ByField("kind", {"deposited": Deposited})),
    CLOUD: lambda events: by_engine(events, of_cloud, types=CloudEvents()),
    AVRO: lambda events: by_engine(events, in_avro, (AvroDeposited, AvroBalance)),
    AVRO_BY_HAND: by_hand,
    CRC32: lambda events: by_engine(events, partitioner="crc32"),
    FUNCTION: lambda events: by_engine(events, partitioner=lambda key, partitions: partition_of(key, partitions)),
    RANGE: page,
    INDEX: lambda rows: page(rows, **_BY),
}


if __name__ == "__main__":
    print(WAYS[sys.argv[1]](int(sys.argv[2])))
