"""The message classes and their codec, byte for byte beside kafka-python's, in every version; spoiled bytes."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import tracemalloc
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any
from uuid import UUID

import pytest

from streams.kafka.wire import codec
from streams.kafka.wire.codec import MalformedAnswer
from streams.kafka.wire.message import Message, Request, WireField
from tests.property.kit import SEED
from tests.wire import generate
from tests.wire.schemas import APIS, OWN, PLAIN

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # kafka-python's own use of importlib.resources
    from kafka.protocol import admin, consumer, metadata, producer, sasl
    from kafka.protocol.admin import cluster, configs, groups, topics, transactions
    from kafka.protocol.api_message import ApiMessage
    from kafka.protocol.consumer import group
    from kafka.protocol.consumer import metadata as members
    from kafka.protocol.producer import transaction

    HOMES = (admin, cluster, configs, groups, topics, transactions, consumer, group, members, metadata, producer)
    HOMES += (transaction, sasl)

RUN = SEED or int.from_bytes(os.urandom(4), "big")
SIZES = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}


def _ours() -> Iterator[tuple[type[Message], range]]:
    for api in APIS:
        module = import_module(f"streams.kafka.wire.schemas.{generate.underscored(api)}")
        request: type[Request[Message]] = getattr(module, f"{api}Request")
        versions = range(request.FIRST_VERSION, request.LAST_VERSION + 1)
        yield request, versions
        yield request.ANSWER, versions
    for name, kinds in PLAIN.items():
        for kind in kinds:
            module = import_module(f"streams.kafka.wire.schemas.{name}")
            yield getattr(module, kind), range(generate.versions(generate.definition(kind)["validVersions"])[1] + 1)


MESSAGES = dict(_ours())
every_message = pytest.mark.parametrize("kind", MESSAGES, ids=[kind.__name__ for kind in MESSAGES])


def seeded_random(name: str) -> random.Random:
    """``SEED=`` repeats a run; a failure shows it."""
    print(f"SEED={RUN}")
    return random.Random(f"{RUN} {name}")


@cache
def _theirs(name: str) -> Any:
    if name not in OWN:
        return next(getattr(home, name) for home in HOMES if hasattr(home, name))

    def json_patch(_metaclass: Any, _shipped: Any) -> dict[str, Any]:
        return OWN[name]

    # kafka-python finds a schema by the name of the class, and lets the class change what it found.
    base = "DescribeGroupsRequest" if name.endswith("Request") else "DescribeGroupsResponse"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return type(ApiMessage)(base, (ApiMessage,), {"json_patch": classmethod(json_patch)})


def _is_bits(field: WireField, theirs: Any) -> bool:
    """kafka-python has these as sets, and two of them under a shorter name."""
    return field.name.endswith("authorized_operations") and field.type == "int32" and not _has_number(field, theirs)


def _has_number(field: WireField, theirs: Any) -> bool:
    found = theirs._struct.fields.get(field.name)
    return found is not None and found._type_str == "int32"


def _translated(message: Message, theirs: Any, version: int) -> Any:
    """The same message in kafka-python's class."""
    values = {}
    for field in message.FIELDS:
        if not field.first <= version <= field.last:
            continue
        value = getattr(message, field.name)
        inner = getattr(theirs, field.type.removeprefix("[]"), None)
        if isinstance(value, Message):
            value = _translated(value, inner, version)
        elif isinstance(value, list) and value and isinstance(value[0], Message):
            value = [_translated(item, inner, version) for item in value]
        if isinstance(value, UUID) and not value.int:
            value = None  # kafka-python's word for it
        name = field.name
        if _is_bits(field, theirs):
            name, value = "authorized_operations", {bit for bit in range(32) if value >> bit & 1}
        values[name] = value
    return theirs(version=version, **values)


def _random(rng: random.Random, kind: type[Message], version: int) -> Message:
    fields = [field for field in kind.FIELDS if field.first <= version <= field.last]
    return kind(**{field.name: _value(rng, kind, field, version) for field in fields})


def _value(rng: random.Random, kind: type[Message], field: WireField, version: int) -> Any:
    inner = field.type.removeprefix("[]")
    # A tagged struct is left out where it is None.
    is_absent = version >= field.tagged_from and inner == field.type and hasattr(kind, inner)
    if (version >= field.nullable_from or is_absent) and rng.random() < 0.3:
        return None
    if field.type != inner:
        return [_plain(rng, kind, inner, version) for _ in range(rng.choice((0, 1, 2)))]
    return _plain(rng, kind, inner, version)


def _plain(rng: random.Random, kind: type[Message], name: str, version: int) -> Any:
    if name in SIZES:
        most = 1 << (SIZES[name] - 1)
        return rng.choice((-most, -1, 0, 1, most - 1, rng.randrange(-most, most)))
    match name:
        case "uint16":
            return rng.randrange(65536)
        case "bool":
            return rng.random() < 0.5
        case "uuid":
            return UUID(bytes=rng.randbytes(16)) if rng.random() < 0.8 else UUID(int=0)
        case "string":
            return rng.choice(("", "x" * 200, "a\0\u00e4\u20ac\U0001f600", "topic"))
        case "bytes" | "records":
            return rng.choice((b"", b"y" * 130, rng.randbytes(9)))
    return _random(rng, getattr(kind, name), version)


@every_message
def test_both_write_the_same_bytes_and_read_them(kind: type[Message]) -> None:
    theirs = _theirs(kind.__name__)
    head = {} if issubclass(theirs, ApiMessage) else {"header": False}
    rng = seeded_random(kind.__name__)
    for version in [*MESSAGES[kind]] * 12:
        message = _random(rng, kind, version)
        encoded = codec.encode(message, version)
        assert encoded == bytes(_translated(message, theirs, version).encode(version=version, **head))
        read = _read(theirs, encoded, version, head)
        assert encoded == bytes(read.encode(version=version, **head))
        assert codec.decode(kind, encoded, version) == message
        assert codec.decode(kind, b"head" + encoded + b"tail", version, 4) == message


def _read(theirs: Any, encoded: bytes, version: int, head: dict[str, bool]) -> Any:
    # Its decoder of ApiVersions takes an answer of version 0 for any version, and guesses which one it has.
    decode = ApiMessage.decode.__func__ if issubclass(theirs, ApiMessage) else theirs.decode.__func__
    read = decode(theirs, encoded, version=version, **head)
    read._header = None  # it misses this where it decoded without a head
    return read


@every_message
def test_the_defaults_are_those_of_the_definition(kind: type[Message]) -> None:
    theirs = _theirs(kind.__name__)
    if kind.__name__ == "ConsumerGroupDescribeResponse":  # theirs has no default for a struct
        return
    head = {} if issubclass(theirs, ApiMessage) else {"header": False}
    for version in MESSAGES[kind]:
        assert codec.encode(kind(), version) == bytes(theirs(version=version).encode(version=version, **head))


@every_message
def test_spoiled_bytes_are_malformed_or_read(kind: type[Message]) -> None:
    rng = seeded_random(kind.__name__)
    for version in [*MESSAGES[kind]] * 6:
        encoded = codec.encode(_random(rng, kind, version), version)
        at, noise = rng.randrange(len(encoded) + 1), rng.randbytes(rng.randrange(1, 7))
        for spoiled in (encoded[:at], encoded[:at] + noise + encoded[at + len(noise) :], noise, encoded[at:]):
            with contextlib.suppress(MalformedAnswer):
                message = codec.decode(kind, spoiled, version)
                assert codec.decode(kind, codec.encode(message, version), version) == message
        if at < len(encoded):
            with pytest.raises(MalformedAnswer):  # a message that is cut is never read as a whole one
                codec.decode(kind, encoded[:at], version)


@pytest.mark.parametrize("name", ["Fetch", "Metadata", "OffsetFetch"])
def test_a_length_that_cannot_be_true_allocates_nothing(name: str) -> None:
    answer = getattr(import_module(f"streams.kafka.wire.schemas.{generate.underscored(name)}"), f"{name}Response")
    rng = seeded_random(name)
    for version in MESSAGES[answer]:
        for _ in range(30):
            noise = bytearray(rng.randbytes(60))
            struct.pack_into(">i", noise, rng.randrange(50), 0x7FFFFFF0)
            tracemalloc.start()
            try:
                codec.decode(answer, bytes(noise), version)
            except MalformedAnswer:
                pass
            finally:
                _, most = tracemalloc.get_traced_memory()
                tracemalloc.stop()
            assert most < 100_000


def test_a_count_of_items_beyond_the_bytes_is_refused_before_an_item_is_read() -> None:
    request = import_module("streams.kafka.wire.schemas.metadata").MetadataRequest
    with pytest.raises(MalformedAnswer, match="2147483647 items are announced at 4 of 5"):
        codec.decode(request, b"\x7f\xff\xff\xff\0", 1)


def test_a_broker_that_knows_no_such_version_answers_in_version_0() -> None:
    module = import_module("streams.kafka.wire.schemas.api_versions")
    refused = module.ApiVersionsResponse(
        error_code=35, api_keys=[module.ApiVersionsResponse.ApiVersion(api_key=18, min_version=0, max_version=2)]
    )
    frame = b"\0\0\0\7" + codec.encode(refused, 0)
    assert codec.decode_answer(module.ApiVersionsRequest(), 3, frame) == refused


def test_unknown_tagged_fields_are_skipped() -> None:
    module = import_module("streams.kafka.wire.schemas.heartbeat")
    body = struct.pack(">ih", 5, 27)
    assert codec.decode(module.HeartbeatResponse, body + b"\2\x07\3abc\x90\x01\0", 4) == module.HeartbeatResponse(
        throttle_time_ms=5, error_code=27
    )
    frame = b"\0\0\0\7" + b"\1\x09\1x" + body + b"\0"
    answer = codec.decode_answer(module.HeartbeatRequest(group_id="g"), 4, frame)
    assert answer == module.HeartbeatResponse(throttle_time_ms=5, error_code=27)


def test_a_tagged_field_does_not_reach_beyond_its_bytes() -> None:
    module = import_module("streams.kafka.wire.schemas.api_versions")
    epoch = struct.pack(">q", 9)
    whole = struct.pack(">hbi", 0, 1, 0)
    assert codec.decode(module.ApiVersionsResponse, whole + b"\1\1\x08" + epoch, 3).finalized_features_epoch == 9
    for size, rest in ((7, epoch), (9, epoch + b"\0")):
        with pytest.raises(MalformedAnswer):
            codec.decode(module.ApiVersionsResponse, whole + b"\1\1" + bytes([size]) + rest, 3)


def test_null_where_the_version_has_none_is_refused_on_both_sides() -> None:
    module = import_module("streams.kafka.wire.schemas.metadata")
    with pytest.raises(ValueError, match=r"MetadataRequest\.topics: this version has no null"):
        codec.encode(module.MetadataRequest(topics=None), 0)
    assert codec.encode(module.MetadataRequest(topics=None), 1)[:4] == b"\xff\xff\xff\xff"
    with pytest.raises(MalformedAnswer, match="a length of -1"):
        codec.decode(module.MetadataRequest, b"\xff\xff\xff\xff", 0)


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"group_id": None}, "HeartbeatRequest.group_id: this version has no null here"),
        ({"group_id": b"g"}, "HeartbeatRequest.group_id: a text is needed, not bytes"),
        ({"generation_id": 1 << 31}, "HeartbeatRequest.generation_id: "),
    ],
)
def test_a_value_that_its_field_cannot_have_is_named(values: dict[str, Any], wrong: str) -> None:
    module = import_module("streams.kafka.wire.schemas.heartbeat")
    with pytest.raises(ValueError, match=wrong):
        codec.encode(module.HeartbeatRequest(**values), 4)


def test_the_generated_modules_are_what_the_table_makes() -> None:
    for name, text in generate.modules().items():
        assert (generate.FOLDER / f"{name}.py").read_text() == text, "run: python -m tests.wire.generate"
    assert {path.stem for path in generate.FOLDER.glob("*.py")} == {"__init__", *generate.modules()}


def test_members_read_each_other_across_versions() -> None:
    module = import_module("streams.kafka.wire.schemas.consumer_protocol")
    kind = module.ConsumerProtocolSubscription
    newer = codec.encode_versioned(kind(topics=["t"], generation_id=4, rack_id="r"), 3) + b"of a later version"
    assert codec.decode_versioned(kind, struct.pack(">h", 9) + newer[2:], 3).rack_id == "r"
    assert codec.decode_versioned(kind, newer, 3) == kind(topics=["t"], generation_id=4, rack_id="r")
    older = codec.decode_versioned(kind, codec.encode_versioned(kind(topics=["t"], generation_id=4), 1), 3)
    assert older == kind(topics=["t"])
    for data in (b"", b"\xff\xff\0\0", b"\0"):
        with pytest.raises(MalformedAnswer):
            codec.decode_versioned(kind, data, 3)
