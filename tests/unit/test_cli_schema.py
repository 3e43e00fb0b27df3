"""``kes schema``: the only place that registers."""

from __future__ import annotations

import sys
import types
from typing import Any

import msgspec
import pytest

from streams import EventSource, EventSourceConfig, event_type
from streams.cli import schema
from streams.cli.main import main
from streams.formats import AvroCodec, SchemaRegistry
from streams.formats.registry_http import Schema
from streams.testing.fake_registry import FakeRegistry

REGISTRY = SchemaRegistry(client=FakeRegistry())
CODEC = AvroCodec(REGISTRY, subject=("a-value", "b-value"))
OTHER = Schema("AVRO", '{"type":"record","name":"A","fields":[]}')


@event_type("cli.Registered", codec=CODEC)
class Registered(msgspec.Struct, frozen=True):
    number: int


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    module: Any = types.ModuleType("cli_schema_program")
    module.source = EventSource(EventSourceConfig(group_id="g", topic="t", num_partitions=1))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(schema, "named_source", lambda name: module.source)
    module.source.output("a")
    REGISTRY.client = fake = FakeRegistry()
    return fake


OTHERS = SchemaRegistry(client=FakeRegistry())


@event_type("cli.OfAnother", codec=AvroCodec(OTHERS, subject="c-value"))
class OfAnother(msgspec.Struct, frozen=True):
    """Of another source in the process, which uses another registry."""

    number: int


def kes(command: str, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    code = main(["schema", command, "cli_schema_program:source", *more])
    return code, capsys.readouterr().out


def test_plan_register_check_and_diff(fake: FakeRegistry, capsys: pytest.CaptureFixture[str]) -> None:
    fake.register("b-value", OTHER)
    code, text = kes("plan", capsys, "--json")
    assert code == 0
    assert [each["state"] for each in msgspec.json.decode(text)] == ["the first version", "a new version"]
    assert len(fake.ids) == 1, "a plan has registered"
    assert kes("check", capsys)[0] == 1
    code, text = kes("diff", capsys)
    assert code == 1
    assert '+      "name": "number",' in text
    code, text = kes("register", capsys, "--json")
    assert code == 0
    assert [each["id"] for each in msgspec.json.decode(text)] == [2, 2]
    assert kes("check", capsys)[0] == kes("diff", capsys)[0] == kes("register", capsys)[0] == 0


@pytest.mark.parametrize("command", ["plan", "check", "register", "diff"])
def test_a_source_that_writes_none_is_no_success(
    command: str, fake: FakeRegistry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = EventSource(EventSourceConfig(group_id="g", topic="t", num_partitions=1))
    monkeypatch.setattr(schema, "named_source", lambda name: other)
    assert main(["schema", command, "shop:source"]) == 1
    assert "shop:source writes no event by a schema registry" in capsys.readouterr().err
    assert not fake.calls


def test_nothing_is_registered_if_one_is_incompatible(fake: FakeRegistry, capsys: pytest.CaptureFixture[str]) -> None:
    fake.register("b-value", OTHER)
    fake.incompatible = lambda subject, schema: "READER_FIELD_MISSING"  # type: ignore[method-assign]
    code, text = kes("register", capsys, "--json")
    assert code == 1
    assert msgspec.json.decode(text)[1]["problem"] == "READER_FIELD_MISSING"
    assert "register a-value" not in fake.calls
