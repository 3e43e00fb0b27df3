"""``kes view`` over a topic in memory: what is shown, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from streams import EventSource, EventSourceConfig, NamedTable, Stores, Table, Windows
from streams.cli import main
from streams.codecs import TupleCodec
from tests.unit.global_log_kit import MemoryConnections, MemoryTopic
from tests.unit.view_kit import number, viewed_topic

View = Callable[..., tuple[int, str, str]]


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryTopic]:
    yield from viewed_topic(monkeypatch)


@pytest.fixture
def view(capsys: pytest.CaptureFixture[str]) -> View:
    def run(*words: str) -> tuple[int, str, str]:
        code = main.main(["view", words[0], "--bootstrap-servers", MemoryConnections.addresses, *words[1:]])
        return code, *capsys.readouterr()

    return run


def test_a_topic_without_types(topic: MemoryTopic, view: View) -> None:
    topic.put(b"o2", b'{"cents": 5}', 1)
    topic.put(b"o1", b"plain \x1b[31m text")
    topic.put(b"\xff", b"\xff\x00")
    topic.put(b"p1", None)
    code, out, _ = view("scan", "rates", "--json")
    found = json.loads(out)
    assert (code, found["keys"], found["positions"]) == (0, 3, {"0": 3, "1": 1})
    assert [(row["partition"], row["key"], row["value"]) for row in found["entries"]] == [
        (0, "o1", "plain \x1b[31m text"),
        (1, "o2", {"cents": 5}),
        (0, {"base64": "/w=="}, {"base64": "/wA="}),
    ]
    code, out, err = view("scan", "rates", "--prefix", "o", "-n", "1")
    assert (code, "o1" in out, "o2" in out, "\x1b" in out) == (0, True, False, False)
    assert "1 of 2 keys are shown" in err
    assert view("get", "rates", "o2")[:2] == (0, '1  o2  {"cents":5}\n')
    assert view("get", "rates", "p1")[:2] == (1, "no such key: p1\n")
    topic.put(b"o2", b"other", 0)
    code, out, err = view("get", "rates", "o2", "--json")
    assert (code, len(json.loads(out)["entries"])) == (0, 2)
    assert "in the partitions 0, 1" in err


def test_a_source_shows_its_types(topic: MemoryTopic, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EventSourceConfig(group_id="bank", topic="bank-events", num_partitions=2)
    module: Any = ModuleType("shop")
    module.source = EventSource(config, Table.factory(key=int, value=int))
    monkeypatch.setitem(sys.modules, "shop", module)
    topic.name = config.changelog
    topic.put(number(-7), number(12))
    topic.put(number(8), b"no number")
    topic.put(b"\xff\xffkes.offset", b"{}")
    code, out, _ = view("get", "shop:source", "--at-least", "0@1", "--", "-7")
    assert (code, out) == (0, "0  -7  12\n")
    entries = json.loads(view("scan", "shop:source", "--json")[1])["entries"]
    assert [(row["key"], bool(row["problem"])) for row in entries] == [(-7, False), (8, True)]


class Shop(Stores):
    orders = NamedTable.of(str, int)
    clicks = Windows.tumbling(str, int, size=60, add=lambda old, item: (old or 0) + item)


def test_one_structure_of_a_source(topic: MemoryTopic, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EventSourceConfig(group_id="bank", topic="bank-events", num_partitions=2)
    module: Any = ModuleType("shop")
    module.source = EventSource(config, Shop.factory())
    monkeypatch.setitem(sys.modules, "shop", module)
    topic.name = config.changelog
    topic.put(b"\xfeorders\0o1", number(12))
    topic.put(b"\xfeclicks\0" + TupleCodec(bytes, int, int).encode((b"o1", 0, 60_000)), number(3))
    topic.put(b"\xfe\0time", number(5))
    assert view("get", "shop:source", "--table", "orders", "o1")[:2] == (0, "0  o1  12\n")
    entries = json.loads(view("scan", "shop:source", "--table", "clicks", "--json")[1])["entries"]
    assert [(row["key"], row["value"]) for row in entries] == [(["o1", 0, 60_000], 3)]
    assert view("get", "shop:source", '["orders","o1"]')[:2] == (0, '0  ["orders","o1"]  12\n')
    for words, says in (
        (["shop:source", "--table", "jobs"], "no structure 'jobs'"),
        (["rates", "--table", "a"], "one"),
    ):
        code, _, err = view("scan", *words)
        assert (code, says in " ".join(err.replace("│", " ").split())) == (2, True), err


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["rates", "a", "--at-least", "x"], 2, "'x' is not PARTITION@OFFSET"),
        (["rates", "a", "--at-least", "9@1"], 1, "rates[9]@2 is no place in it: there are partitions 0 to 1"),
        (["rates", "a", "--at-least", "0@100", "--timeout", "0.2"], 1, "not there within 0.2 s: [0] at 0 of 101"),
        (["no_such:source", "a"], 1, "cannot import 'no_such'"),
    ],
)
def test_what_is_wrong_is_said(topic: MemoryTopic, view: View, words: list[str], code: int, text: str) -> None:
    found, _, err = view("get", *words)
    assert (found, text in " ".join(err.replace("│", " ").split())) == (code, True), err


def test_topics_that_cannot_be_viewed(topic: MemoryTopic, view: View) -> None:
    topic.policy = "delete"
    code, _, err = view("scan", "rates")
    assert (code, "cleanup.policy=delete, not compact" in err, "Traceback" in err) == (1, True, False)
    topic.exists = False
    code, _, err = view("watch", "rates", "--timeout", "0.2")
    assert (code, "topic rates does not exist" in err, "Traceback" in err) == (1, True, False)
