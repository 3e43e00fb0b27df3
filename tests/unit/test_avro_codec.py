"""Avro by a schema registry, against Confluent's serializers and with bytes of nobody."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import random
from typing import Any
from uuid import UUID

import msgspec
import pytest
from confluent_kafka.schema_registry import Schema as TheirSchema
from confluent_kafka.schema_registry import SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from streams.errors import ConfigError, DecodeError, EncodeError
from streams.events import event_type_of
from streams.formats import AvroCodec, BySchema, SchemaRegistry
from streams.formats.registry_http import Schema
from streams.protocols import Codec
from streams.records import IncomingRecord
from streams.testing.fake_registry import FakeRegistry


class Line(msgspec.Struct, frozen=True):
    item: str
    count: int = 1


class Order(msgspec.Struct, frozen=True):
    id: UUID
    cents: int
    at: dt.datetime
    day: dt.date
    rate: float
    raw: bytes
    paid: bool = False
    note: str | None = None
    lines: list[Line] = []
    tags: dict[str, str] = {}
    main: Line | None = None


ORDER = Order(
    UUID(int=7), -(2**63), dt.datetime(2026, 11, 30, 1, 2, 3, 4, dt.UTC), dt.date(1970, 1, 1), 0.1, b"\0\xff", True,
    "é", [Line("a"), Line("b", 2**63 - 1)], {"k": "v"}, Line("m"),
)  # fmt: skip


class Flat(msgspec.Struct, frozen=True):
    name: str
    number: int = 0
    ratio: float = 0.0


def bound(cls: type, fake: FakeRegistry, name: str = "shop.Order", schema: Any = None, version: int = 1) -> Any:
    codec = AvroCodec(SchemaRegistry(client=fake), subject="s", schema=None if schema is None else json.dumps(schema))
    made = codec.for_event(cls, name, version)
    fake.register("s", made.schema)
    made.prepare()
    return made


def record(*fields: Any, name: str = "Flat", **more: Any) -> dict[str, Any]:
    listed = [{"name": each[0], "type": each[1]} | ({"default": each[2]} if len(each) > 2 else {}) for each in fields]
    return {"type": "record", "name": name, "fields": listed, **more}


def written(fake: FakeRegistry, schema: Any, *body: bytes) -> bytes:
    number = fake.register("s", Schema("AVRO", json.dumps(schema)))
    return b"\0" + number.to_bytes(4, "big") + b"".join(body)


def test_both_directions_with_confluents_serializers() -> None:
    fake = FakeRegistry()
    ours = bound(Order, fake)
    client = SchemaRegistryClient.new_client({"url": "mock://"})
    assert client.register_schema("orders-value", TheirSchema(ours.schema.text, "AVRO")) == 1
    context = SerializationContext("orders", MessageField.VALUE, [])
    plain = msgspec.to_builtins(ORDER, builtin_types=(bytes, dt.datetime, dt.date, UUID))
    theirs = AvroSerializer(client, ours.schema.text, conf={"auto.register.schemas": False})(plain, context)
    assert ours.encode(ORDER) == theirs
    assert ours.decode(theirs) == ORDER
    read = AvroDeserializer(client)(ours.encode(ORDER), context)
    assert msgspec.convert(read, Order) == ORDER
    in_header = AvroSerializer(
        client, ours.schema.text,
        conf={"auto.register.schemas": False, "schema.id.serializer": header_schema_id_serializer},
    )(plain, context)  # fmt: skip
    [(name, content)] = context.headers
    registry = ours.registry
    registry._keep(content, ours.schema)  # what GET /schemas/guids/... answers
    typed = BySchema(registry).typed(IncomingRecord("orders", 0, 0, None, in_header, ((name, content),)))
    assert typed.record_type == "shop.Order"
    assert ours.decode(typed.value) == ORDER
    assert typed.as_received.value == in_header


RESOLVED: Any = {
    "a promotion, and a default": ([("name", "string"), ("number", "int")], b"\2x\6", Flat("x", 3)),
    "a field is gone": ([("name", "string"), ("old", "long"), ("ratio", "float")], b"\2x\2\0\0\0?", Flat("x", 0, 0.5)),
    "no default": ([("number", "long")], b"\6", "No default|no default|name"),
    "another kind of field": ([("name", "string"), ("number", "string")], b"\2x\2y", "Schema mismatch|number|promot"),
    "a null for a text": ([("name", ["null", "string"])], b"\0", "Schema mismatch|name|null"),
}  # fmt: skip


@pytest.mark.parametrize("case", RESOLVED)
def test_the_schema_of_the_writer_is_resolved(case: str) -> None:
    fields, body, expected = RESOLVED[case]
    fake = FakeRegistry()
    codec = bound(Flat, fake, "Flat")
    data = written(fake, record(*fields), body)
    if isinstance(expected, str):
        with pytest.raises(DecodeError, match=f"Flat, written by the schema 2, read by 1: .*({expected})"):
            codec.decode(data)
    else:
        assert codec.decode(data) == expected


HOSTILE: Any = {
    "an array of nulls": (record(("name", {"type": "array", "items": "null"})), b"\x80\x80\x80\x80\x80\x01\0"),
    "of empty records": (record(("name", {"type": "array", "items": record(name="E")})), b"\x80\x80\x80\x10\0"),
    "a tree without an end": (record(("next", ["null", "Flat"])), b"\2" * 200_000),
    "100 levels": (record(("name", json.loads('{"type":"array","items":' * 100 + '"int"' + "}" * 100))), b"\0"),
    "a text of 2^62 bytes": (record(("name", "string")), b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f"),
    "no schema": ({"type": "record"}, b""),
    "of another kind": ("int", b"\2"),
    "bytes behind it": (record(("name", "string")), b"\2xx"),
    "a name that nobody knows": (record(("name", "Nobody")), b""),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_schemas_and_values(case: str) -> None:
    fake = FakeRegistry()
    codec = bound(Flat, fake, "Flat")
    with pytest.raises(DecodeError, match="Flat, written by the schema 2"):
        codec.decode(written(fake, *HOSTILE[case]))


def test_references_of_a_schema_are_read_first() -> None:
    fake = FakeRegistry()
    codec = AvroCodec(SchemaRegistry(client=fake)).for_event(Flat, "Flat", 1)
    name = json.dumps({"type": "record", "name": "shop.Name", "fields": [{"name": "x", "type": "int"}]})
    text = Schema("AVRO", json.dumps(record(("name", "shop.Name"))), (name,))
    fake.register("s", text)
    assert codec.decode_dict(b"\0\0\0\0\1\2") == {"name": {"x": 1}}


def test_mutations_are_a_decode_error_or_a_value() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, fake = random.Random(seed), FakeRegistry()
    codec = bound(Order, fake)
    whole = codec.encode(ORDER)
    for _ in range(2_000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            act = rng.random()
            place = rng.randrange(len(data)) if data else 0
            if act < 0.6 and data:
                data[place] = rng.randrange(256)
            elif act < 0.8:
                del data[place:]
            else:
                data[place:place] = rng.randbytes(rng.randint(1, 4))
        with contextlib.suppress(DecodeError):
            codec.decode(bytes(data))


REFUSED: Any = {
    "too large": (Flat("x", 2**63), None),
    "cut": (Flat("x", 1.5), None),  # type: ignore[arg-type]
    "another class": (Line("x"), None),
    "beyond int": (Flat("x", 2**40), record(("name", "string"), ("number", "int"), ("ratio", "double"))),
    "beyond float": (Flat("x", 1, 0.1), record(("name", "string"), ("number", "long"), ("ratio", "float"))),
    "a field that the schema lacks": (Flat("x", 1, 0.1), record(("name", "string"), ("number", "long"))),
    "no symbol": (Flat("x"), record(("name", {"type": "enum", "name": "E", "symbols": ["y"]}),
                                    ("number", "long"), ("ratio", "double"))),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_come_back_is_not_written(case: str) -> None:
    value, schema = REFUSED[case]
    with pytest.raises(EncodeError):
        bound(Flat, FakeRegistry(), "Flat", schema).encode(value)


def test_a_schema_of_ones_own_is_written_as_it_stands() -> None:
    fields = ("name", "string"), ("number", "int"), ("ratio", "float")
    codec = bound(Flat, FakeRegistry(), "Flat", record(*fields, doc="ours", **{"kes.version": 2}))
    value = Flat("x", 2**31 - 1, 0.5)
    assert codec.decode(codec.encode(value)) == value
    assert json.loads(codec.schema.text)["doc"] == "ours"


def test_times_need_a_zone() -> None:
    with pytest.raises(EncodeError, match="without a zone"):
        bound(Order, FakeRegistry()).encode(msgspec.structs.replace(ORDER, at=dt.datetime(2026, 1, 1)))


@pytest.mark.parametrize("kind", [int | str, dict[int, str], tuple[int, str], list[int | str | None], object])
def test_what_no_schema_is_derived_for(kind: Any) -> None:
    cls = msgspec.defstruct("Odd", [("it", kind)])
    with pytest.raises(ConfigError, match=r"no Avro schema is derived .*: give AvroCodec\(schema=\.\.\.\)"):
        AvroCodec(SchemaRegistry(client=FakeRegistry())).for_event(cls, "Odd", 1)


def test_versions_go_through_upcasters_by_the_property_of_the_schema() -> None:
    fake = FakeRegistry()
    codec = bound(Flat, fake, "Flat", version=2)
    assert json.loads(codec.schema.text)["kes.version"] == 2
    data = written(fake, record(("old", "string")), b"\2x")
    rule = BySchema(codec.registry)
    assert rule.typed(IncomingRecord("t", 0, 0, None, data, None)).headers == (("__grt__", b"Flat"),)
    new = rule.typed(IncomingRecord("t", 0, 0, None, codec.encode(Flat("y")), None))
    assert new.header("__grv__") == b"2"
    assert codec.from_dict({"name": codec.decode_dict(data)["old"]}) == Flat("x")
    with pytest.raises(DecodeError, match="upcasters did not make a Flat"):
        codec.from_dict({"name": 1})


def test_values_of_before_the_registry_are_read_by_another_codec() -> None:
    from streams.codecs import JsonCodec

    bare: Codec[Flat] = JsonCodec(Flat)
    codec = AvroCodec(SchemaRegistry(client=FakeRegistry()), bare=bare).for_event(Flat, "Flat", 1)
    assert codec.decode(b'{"name":"x"}') == Flat("x")
    with pytest.raises(DecodeError, match=r"does not begin with the id of a schema: b'\{\"name\"'"):
        AvroCodec(SchemaRegistry(client=FakeRegistry())).for_event(Flat, "Flat", 1).decode(b'{"name"')


def test_the_codec_of_an_event_is_its_own() -> None:
    from streams import event_type

    shared = AvroCodec(SchemaRegistry(client=FakeRegistry()))
    a, b = (event_type(name, codec=shared)(msgspec.defstruct("X", [("n", int)])) for name in ("own.A", "own.B"))
    assert json.loads(event_type_of(a).codec.schema.text)["name"] == "A"
    assert json.loads(event_type_of(b).codec.schema.text)["name"] == "B"
