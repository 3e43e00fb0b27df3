"""``kes topology --asyncapi``: the structure of AsyncAPI 3.0, schemas of all kinds of classes, nothing that is secret.

The rules of the structure are those of the specification that concern what is written here; the whole JSON schema of
AsyncAPI (380 kB) is no test's resource.
"""

from __future__ import annotations

import enum
import json
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
import yaml  # type: ignore[import-untyped]

from streams import EventSource, Table, event_type
from streams.codecs import JsonCodec, MsgpackCodec
from streams.formats import ByField, CloudEvents, Deleted, Only
from streams.looks.asyncapi import asyncapi
from tests.unit.cli_kit import Kes
from tests.vocabulary import config_of

SECRET, HOST = "S3CRET", "kafka.internal:9092"


class Kind(enum.Enum):
    BOOK = "book"


class Line(msgspec.Struct):
    sku: str
    count: int = 1


@event_type("shop.Placed", version=2, aliases=("old-placed",))
class Placed(msgspec.Struct, frozen=True):
    """An order was placed."""

    order: str
    lines: list[Line]
    kind: Kind = Kind.BOOK
    at: datetime | None = None


class Tree(msgspec.Struct, frozen=True):
    name: str
    children: list[Tree] = []


event_type("shop/Tree é", codec=MsgpackCodec(Tree))(Tree)


class Inner:
    class Line(pydantic.BaseModel):
        ean: int


@event_type("shop.Scanned")
class Scanned(pydantic.BaseModel):
    line: Inner.Line
    price: float = pydantic.Field(gt=0)


class Own:
    def encode(self, value: Any, /) -> bytes:
        return b""

    def decode(self, data: bytes, /) -> Any:
        return Custom()


@event_type("shop.Custom", codec=Own())
class Custom:
    pass


def shop() -> EventSource[Any]:
    config = config_of(
        group_id="shop",
        topic="orders",
        num_partitions=4,
        loop=True,
        visits=True,
        bootstrap_servers=f"{HOST},other:9092",
        client_settings={"security.protocol": "SASL_SSL", "sasl.password": SECRET},
    )
    source = EventSource(config, Table.factory(key=str, value=int))
    for cls in (Placed, Tree, Scanned, Custom):
        source.register_event_type(cls, lambda ctx, event: None)
    source.register_event_type(Deleted, lambda ctx, event: None)
    source.input("scans", types=ByField("kind", {"scan": Scanned}, nulls=Deleted))
    source.input("clouds", types=CloudEvents())
    source.join("customers", key=str, value=Tree)
    source.lookup("rates", key=str, value=int)
    source.output("out", num_partitions=2, partitioner="crc32", null_keys="cause", form=CloudEvents(source="/shop"))
    source.output("plain", configs={"cleanup.policy": "compact,delete"})
    return source


# -- the structure -----------------------------------------------------------------------------------------------------

NAME = re.compile(r"[a-zA-Z0-9.\-_]+")
CHANNEL = {"address", "description", "messages", "bindings"}
MESSAGE = {"name", "title", "contentType", "headers", "payload", "bindings"}
KAFKA = {"topic", "partitions", "replicas", "topicConfiguration", "bindingVersion"}


def known(found: dict[str, Any], fields: set[str], required: set[str]) -> None:
    assert {name for name in found if not name.startswith("x-")} <= fields, found
    assert required <= found.keys(), found


def resolved(document: dict[str, Any], reference: str) -> Any:
    assert reference.startswith("#/"), reference
    at: Any = document
    for part in reference[2:].split("/"):
        at = at[part]
    return at


def references(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        own = [tree["$ref"]] if isinstance(tree.get("$ref"), str) else []
        return own + [found for value in tree.values() for found in references(value)]
    return [found for value in tree for found in references(value)] if isinstance(tree, list) else []


def check(document: dict[str, Any]) -> None:
    known(document, {"asyncapi", "info", "servers", "channels", "operations", "components"}, {"asyncapi", "info"})
    assert document["asyncapi"] == "3.0.0"
    known(document["info"], {"title", "version"}, {"title", "version"})
    for name, channel in document["channels"].items():
        assert NAME.fullmatch(name)
        known(channel, CHANNEL, {"address"})
        known(channel["bindings"]["kafka"], KAFKA, {"topic"})
        for title, message in channel.get("messages", {}).items():
            assert NAME.fullmatch(title)
            known(message, MESSAGE, {"payload"})
            key = message.get("bindings", {}).get("kafka", {}).get("key", {})
            assert "$ref" not in key, "oneOf a reference and a schema: it would be both"
            assert message.get("headers", {"type": "object"})["type"] == "object"
    for name, operation in document["operations"].items():
        assert NAME.fullmatch(name)
        known(operation, {"action", "channel", "messages"}, {"action", "channel"})
        assert operation["action"] in ("send", "receive")
        for message in operation.get("messages", []):
            assert message["$ref"].startswith(operation["channel"]["$ref"] + "/messages/")
    for server in document.get("servers", {}).values():
        known(server, {"host", "protocol"}, {"host", "protocol"})
    assert all(NAME.fullmatch(name) for name in document.get("components", {}).get("schemas", {}))
    for reference in references(document):
        resolved(document, reference)


def plain(source: EventSource[Any], **options: Any) -> dict[str, Any]:
    return dict(json.loads(msgspec.json.encode(asyncapi(source, **options))))


def test_all_of_a_source_has_its_place() -> None:
    document = plain(shop())
    check(document)
    channels = document["channels"]
    own = {"orders", "shop.orders.dead-letters", "shop.orders.loop"}
    assert channels.keys() == own | {"scans", "clouds", "customers", "rates", "out", "plain"}  # no state, no requests
    assert document["operations"].keys() == {
        *(f"receive.{topic}" for topic in ("orders", "shop.orders.loop", "scans", "clouds", "customers", "rates")),
        *(f"send.{topic}" for topic in ("shop.orders.dead-letters", "shop.orders.loop", "out", "plain")),
    }
    assert channels["orders"]["bindings"]["kafka"]["partitions"] == 4
    assert "partitions" not in channels["rates"]["bindings"]["kafka"]
    assert channels["plain"]["bindings"]["kafka"]["topicConfiguration"] == {"cleanup.policy": ["compact", "delete"]}
    assert (channels["out"]["x-kes-partitioner"], channels["out"]["x-kes-null-keys"]) == ("crc32", "cause")
    assert channels["plain"]["x-kes-partitioner"] == "murmur2"
    check(plain(EventSource(config_of(group_id="g", topic="in", num_partitions=1))))


def test_messages_say_their_type_as_records_of_the_topic_do() -> None:
    channels = plain(shop())["channels"]
    placed = channels["orders"]["messages"]["shop.Placed"]
    assert (placed["contentType"], placed["x-kes-version"], placed["x-kes-aliases"]) == (
        "application/json", 2, ["old-placed"],
    )  # fmt: skip
    assert {name: said["const"] for name, said in placed["headers"]["properties"].items()} == {
        "__grt__": "shop.Placed",
        "__grv__": "2",
    }
    assert "headers" not in channels["scans"]["messages"]["shop.Scanned"]
    assert channels["scans"]["messages"].keys() == {"shop.Scanned"}
    assert "deletes its key" in channels["scans"]["description"]
    headers = channels["clouds"]["messages"]["shop.Placed"]["headers"]["properties"]
    assert headers == {"ce_type": {"type": "string", "const": "shop.Placed"}}
    [tree] = [name for name in channels["orders"]["messages"] if name.startswith("shop_Tree")]
    assert channels["orders"]["messages"][tree]["name"] == "shop/Tree é"
    assert channels["orders"]["messages"][tree]["contentType"] == "application/msgpack"
    assert channels["customers"]["messages"]["row"]["bindings"]["kafka"]["key"] == {"type": "string"}


def test_schemas_are_those_of_msgspec_and_pydantic_and_two_classes_of_a_name_are_two() -> None:
    document = plain(shop())
    schemas = document["components"]["schemas"]
    placed = schemas["shop.Placed"]
    assert placed["description"] == "An order was placed."
    assert placed["required"] == ["order", "lines"]
    assert placed["properties"]["lines"]["items"] == {"$ref": "#/components/schemas/shop.Placed.Line"}
    assert schemas["shop.Placed.Line"]["properties"]["sku"] == {"type": "string"}
    assert schemas["shop.Placed.Kind"]["enum"] == ["book"]
    assert schemas["shop.Scanned"]["properties"]["price"]["exclusiveMinimum"] == 0
    assert schemas["shop.Scanned.Line"]["properties"].keys() == {"ean"}
    [name] = [name for name in schemas if name.startswith("shop_Tree")]
    assert schemas[name]["properties"]["children"]["items"] == {"$ref": f"#/components/schemas/{name}"}
    assert schemas["shop.Custom"]["format"] == "binary"
    assert "Own" in schemas["shop.Custom"]["description"]


def test_names_that_are_not_allowed_do_not_meet() -> None:
    source = EventSource(config_of(group_id="g", topic="in", num_partitions=1))
    for name in ("a/b", "a b", "a_b", "ä" * 40, "ä" * 40 + "b"):
        made = event_type(name)(msgspec.defstruct("Named", [("x", int)], frozen=True))
        source.register_event_type(made, lambda ctx, event: None)
    document = plain(source)
    check(document)
    assert len(document["channels"]["in"]["messages"]) == len(document["components"]["schemas"]) == 5


def test_a_class_without_a_schema_says_so() -> None:
    class Hooked(JsonCodec[Any]):
        def json_schema(self, before: str, /) -> Any:
            raise TypeError("no schema of this")

    made = event_type("g.Hooked", codec=Hooked(Line))(msgspec.defstruct("Hooked", [("x", int)], frozen=True))
    source = EventSource(config_of(group_id="g", topic="in", num_partitions=1), types=Only(made))
    source.register_event_type(made, lambda ctx, event: None)
    document = plain(source)
    check(document)
    assert "no schema of this" in document["components"]["schemas"]["g.Hooked"]["description"]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "described_shop.py").write_text("from tests.unit.test_asyncapi import shop\nsource = shop()\n")
    return "described_shop:source"


def test_json_and_yaml_are_one_document_without_addresses_and_secrets(kes: Kes, module: str) -> None:
    as_json, as_yaml = kes("topology", module, "--asyncapi"), kes("topology", module, "--asyncapi", "--yaml")
    check(as_json.data)
    assert as_json.data == yaml.safe_load(as_yaml.out)
    assert as_json.data["info"] == {"title": "shop", "version": "1.0.0"}
    for text in (as_json.out, as_yaml.out):
        assert SECRET not in text
        assert HOST not in text
        assert "sasl" not in text
    shown = kes("topology", module, "--asyncapi", "--json", "--servers", "--api-version", "7")
    check(shown.data)
    assert SECRET not in shown.out
    assert shown.data["servers"]["kafka0"] == {"host": HOST, "protocol": "kafka-secure"}
    assert shown.data["info"]["version"] == "7"


@pytest.mark.parametrize(
    "options",
    ["--yaml", "--servers", "--api-version 2", "--asyncapi --mermaid", "--asyncapi --yaml --json"],
)
def test_options_that_do_not_go_together(kes: Kes, module: str, options: str) -> None:
    assert "--asyncapi" in kes("topology", module, *options.split(), code=2).words or "--json" in options


def test_without_yaml_the_command_says_what_to_install(kes: Kes, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "pip install pyyaml" in kes("topology", module, "--asyncapi", "--yaml", code=1).words
