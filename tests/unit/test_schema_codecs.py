"""JSON Schema and Protobuf by a schema registry, against Confluent's serializers and with bytes of nobody."""

from __future__ import annotations

import base64
import contextlib
import json
import random
from typing import Any

import msgspec
import pytest
from confluent_kafka.schema_registry import Schema as TheirSchema
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import BaseModel

from streams.codecs import JsonCodec
from streams.errors import ConfigError, DecodeError, EncodeError, RegistryUnavailable
from streams.formats import BySchema, JsonSchemaCodec, ProtobufCodec, SchemaRegistry
from streams.formats.protobuf import _from_text, indexes
from streams.formats.registry_http import Schema
from streams.records import IncomingRecord
from streams.testing.fake_registry import FakeRegistry

CONTEXT = SerializationContext("orders", MessageField.VALUE, [])


class Line(msgspec.Struct, frozen=True):
    item: str
    count: int = 1


class Order(msgspec.Struct, frozen=True):
    id: str
    lines: list[Line] = []


class Model(BaseModel):
    id: str
    count: int = 0


def file() -> FileDescriptorProto:
    made = FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    for name, within in (("Cancelled", ()), ("Placed", ("Note", "Line"))):
        message = made.message_type.add(name=name)
        message.field.add(name="id", number=1, type=9, label=1)
        for each in within:
            message.nested_type.add(name=each).field.add(name="item", number=1, type=9, label=1)
    return made


POOL = DescriptorPool()
POOL.Add(file())
CANCELLED, PLACED, LINE = (
    GetMessageClass(POOL.FindMessageTypeByName(f"shop.{name}")) for name in ("Cancelled", "Placed", "Placed.Line")
)
SHOP = """
// message Wrong { }
syntax = "proto3"; /* message Wrong { */ package shop;
option java_package = "message Wrong {";
enum Kind { NONE = 0; }
message Cancelled { string id = 1; oneof it { string message = 2; } }
message Placed {
  string id = 1;
  message Note { string item = 1; }
  message Line { string item = 1; }
}
"""


def bound(codec: type[Any], cls: type, fake: FakeRegistry, name: str, **options: Any) -> Any:
    made = codec(SchemaRegistry(client=fake), subject="s", **options).for_event(cls, name, 1)
    fake.register("s", made.schema)
    made.prepare()
    return made


def confluents(schema: Schema) -> SchemaRegistryClient:
    client = SchemaRegistryClient.new_client({"url": "mock://"})
    assert client.register_schema("orders-value", TheirSchema(schema.text, schema.kind)) == 1
    return client


@pytest.mark.parametrize(("cls", "value"), [(Order, Order("a", [Line("x", 2)])), (Model, Model(id="a", count=3))])
def test_json_in_both_directions(cls: Any, value: Any) -> None:
    fake = FakeRegistry()
    ours = bound(JsonSchemaCodec, cls, fake, "shop.Order")
    client = confluents(ours.schema)
    plain = value.model_dump() if cls is Model else msgspec.to_builtins(value)
    conf = {"auto.register.schemas": False}
    theirs = JSONSerializer(ours.schema.text, client, conf=conf)(plain, CONTEXT)
    assert theirs[:5] == ours.encode(value)[:5]
    assert ours.decode(theirs) == value
    assert JSONDeserializer(ours.schema.text, schema_registry_client=client)(ours.encode(value), CONTEXT) == plain
    record = BySchema(ours.registry).typed(IncomingRecord("t", 0, 0, None, theirs, None))
    assert record.record_type == "shop.Order"


def test_json_is_read_without_its_schema_and_by_another_codec_without_an_id() -> None:
    fake = FakeRegistry()
    codec = JsonSchemaCodec(SchemaRegistry(client=fake), bare=JsonCodec(Order)).for_event(Order, "shop.Order", 1)
    fake.error = RegistryUnavailable("away")
    assert codec.unknown(b"\0\0\0\0\7{}") is None
    assert codec.decode(b'\0\0\0\0\7{"id":"x"}') == codec.decode(b'{"id":"x"}') == Order("x")
    assert codec.decode_dict(b'\0\0\0\0\7{"old":1}') == {"old": 1}
    for wrong in (b"\0\0\0\0\7{", b"\0\0", b"\0\0\0\0\7" + b'{"id":1}'):
        with pytest.raises(DecodeError):
            codec.decode(wrong)
    with pytest.raises(ConfigError, match="takes a class with fields"):
        JsonSchemaCodec(SchemaRegistry(client=fake)).for_event(bytes, "b", 1)


@pytest.mark.parametrize("schema", [None, SHOP], ids=["derived", "text"])
@pytest.mark.parametrize("cls", [CANCELLED, PLACED, LINE], ids=lambda cls: cls.DESCRIPTOR.full_name)
def test_protobuf_in_both_directions(cls: Any, schema: str | None) -> None:
    fake = FakeRegistry()
    name = cls.DESCRIPTOR.full_name
    ours = bound(ProtobufCodec, cls, fake, name, schema=schema)
    value = cls(**{cls.DESCRIPTOR.fields[0].name: "é"})
    # The mock compares texts, and theirs is derived.
    client = confluents(bound(ProtobufCodec, cls, FakeRegistry(), name).schema)
    theirs = ProtobufSerializer(cls, client, {"auto.register.schemas": False})(value, CONTEXT)
    assert ours.encode(value) == theirs
    assert ours.decode(theirs) == value
    assert ProtobufDeserializer(cls, {"use.deprecated.format": False}, client)(ours.encode(value), CONTEXT) == value
    assert BySchema(ours.registry).typed(IncomingRecord("t", 0, 0, None, theirs, None)).record_type == name


def test_another_message_of_the_file_is_not_read_as_this_one() -> None:
    fake = FakeRegistry()
    placed, cancelled = (bound(ProtobufCodec, cls, fake, cls.DESCRIPTOR.name) for cls in (PLACED, CANCELLED))
    with pytest.raises(DecodeError, match=r"Cancelled, .*: it is a shop\.Placed, not a shop\.Cancelled"):
        cancelled.decode(placed.encode(PLACED(id="x")))


@pytest.mark.parametrize(
    "rest",
    [b"", b"\2", b"\x80", b"\xff" * 500, b"\1", b"\x84\1" + b"\0" * 66, b"\2\6", b"\2\1", b"\4\2\x08", b"\0\x0a\x05x"],
)
def test_indexes_and_values_that_are_cut_or_lead_nowhere(rest: bytes) -> None:
    codec = bound(ProtobufCodec, PLACED, FakeRegistry(), "Placed")
    with pytest.raises(DecodeError, match="Placed, written by the schema 1"):
        codec.decode(b"\0\0\0\0\1" + rest)


def test_mutations_are_a_decode_error_or_a_value() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, fake = random.Random(seed), FakeRegistry()
    codecs = [(bound(ProtobufCodec, LINE, fake, "Line"), LINE(item="xyz" * 9)),
              (bound(JsonSchemaCodec, Order, fake, "Order"), Order("a", [Line("x")]))]  # fmt: skip
    for codec, value in codecs:
        whole = codec.encode(value)
        for _ in range(1_000):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                place = rng.randrange(len(data)) if data else 0
                data[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
            with contextlib.suppress(DecodeError):
                codec.decode(bytes(data))


def test_what_a_protobuf_codec_does_not_take() -> None:
    registry = SchemaRegistry(client=FakeRegistry())
    for cls, version in ((Order, 1), (PLACED, 2)):
        with pytest.raises(ConfigError, match="takes the class of a message, of version 1"):
            ProtobufCodec(registry).for_event(cls, "x", version)
    with pytest.raises(EncodeError, match=r"Placed expected, got Timestamp"):
        bound(ProtobufCodec, PLACED, FakeRegistry(), "Placed").encode(Timestamp())


@pytest.mark.parametrize(
    "text", ["", "}" * 1000, "{" * 1000, "/*" * 100_000, '"' * 1001, "message", "message A {" * 500]
)
def test_texts_that_are_no_file(text: str) -> None:
    _from_text(text)


def test_servers_that_return_the_descriptor() -> None:
    fake = FakeRegistry()
    number = fake.register("s", Schema("PROTOBUF", base64.b64encode(file().SerializeToString()).decode()))
    rule = BySchema(SchemaRegistry(client=fake))
    value = bytes([0, 0, 0, 0, number, 4, 2, 2])
    assert rule.typed(IncomingRecord("t", 0, 0, None, value, None)).record_type == "shop.Placed.Line"
    assert indexes(b"\4\2\2rest") == ((1, 1), 3)


def test_what_names_no_type() -> None:
    fake = FakeRegistry()
    for kind, text in (
        ("AVRO", '"int"'),
        ("JSON", "{}"),
        ("JSON", "no"),
        ("XML", "<a/>"),
        ("AVRO", json.dumps({"name": 1})),
    ):
        number = fake.register("s", Schema(kind, text))
        record = BySchema(SchemaRegistry(client=fake)).typed(
            IncomingRecord("t", 0, 0, None, bytes([0, 0, 0, 0, number, 1]), None)
        )
        assert record.is_refused, text  # type: ignore[attr-defined]
