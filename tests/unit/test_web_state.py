"""Keys of the state, looked up by the monitor at the members that own them; and what an answer does not prove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from streams import EventSource, NamedTable, Stores, Table, Windows
from streams.codecs import codec_for, int_codec
from streams.errors import BrokerUnavailable, NotCaughtUp, NotOwned, StoreError
from streams.sak.murmur2 import partition_of
from streams.settings.groups import QueryConfig
from streams.stores.simple import SimpleStore
from tests.unit.private_kit import private
from tests.unit.test_web_pages import HOSTILE, _Reading
from tests.unit.web_kit import ACT, QUERY, TOKENS, ask, served, source_of

from streams.runtime.queries.questions import Question, Reply  # isort: skip
from streams.queries.reader import StateReader  # isort: skip
from streams.web import look_up  # isort: skip


def stateful(tmp_path: Path, store: Any, has_secret: bool = True) -> EventSource[Any]:
    secret = str(private(tmp_path / "secret", "the secret of this group")) if has_secret else ""
    return EventSource(source_of(queries=QueryConfig(secret_file=secret)).config, store)


def test_a_key_is_looked_up_at_its_owner_and_the_proof_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value: bytes | None = HOSTILE.encode()
    asked: list[Question] = []

    async def answer(self: StateReader[Any, Any], question: Question, timeout_seconds: float) -> tuple[Reply, float]:
        asked.append(question)
        placed = (("orders", question.partition, 7),)
        reply = Reply(
            partition=question.partition, positions=placed, age_seconds=0.5, parked=True, served_by="w-<b>", value=value
        )
        return reply, 1_000.0

    monkeypatch.setattr(StateReader, "_ask", answer)
    path = private(tmp_path / "tokens.toml", TOKENS)
    with served(stateful(tmp_path, Table.factory(key=str, value=str)), str(path)) as monitor:
        page = _Reading(ask(monitor.port, f"/state?key={quote(HOSTILE)}&partition=2", QUERY, Accept="text/html").text)
        assert (page.scripts, page.handlers) == (["/static/monitor.js"], [])
        shown = "".join(page.texts)
        assert not set("\x00\x1b\u202e") & set(shown)
        assert shown.count("<script>alert(1)</script>\\x1b[31m\\u202ekey\\x00") == 2, "key and value"
        for text in (
            "w-<b>, for partition 2",
            "this key are parked",
            "orders[2] 7",
            "the owner, by a commit or its lease",
        ):
            assert text in shown
        assert (asked[0].key, asked[0].confirm) == (HOSTILE.encode(), False)

        def look(query: str) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(ask(monitor.port, f"/api/v1/state?{query}", QUERY).text)
            return found

        assert look("key64=YW5u&confirm=true&partition=1") == {
            "found": True, "value": HOSTILE.encode("unicode_escape").decode().replace("\\\\", "\\"), "problem": "",
            "note": "", "parked": True, "due": False, "partition": 1,
            "served_by": "w-<b>", "positions": {"orders[1]": 7}, "as_of_ms": 999_500,
            "proof": "the owner, confirmed by a commit after the read",
        }  # fmt: skip
        assert (asked[-1].key, asked[-1].confirm) == (b"ann", True)
        assert look("key=a&max_staleness=2.5")["proof"] == "the owner, or a copy that lacks nothing older than 2.5 s"
        assert asked[-1].max_staleness == 2.5
        for key in ("../../etc/passwd", "..%2f..%2f%00", "%ff%fe", "%E2%80%AE%1b%5B31m", "NaN", "k" * 60_000):
            reply = ask(monitor.port, f"/state?key={key}", QUERY)
            assert (reply.status, set("\x00\x1b\u202e") & set(reply.text)) == (200, set()), key[:20]
        value = b"v" * 1_000_000
        assert len(look("key=a")["value"]) == look_up.LONGEST_VALUE


def test_a_structure_is_asked_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shop(Stores):
        orders = NamedTable.of(str, int)
        clicks = Windows.tumbling(str, int, size=60, add=lambda old, item: (old or 0) + item)

    asked: list[Question] = []

    async def answer(self: StateReader[Any, Any], question: Question, timeout_seconds: float) -> tuple[Reply, float]:
        asked.append(question)
        number = question.partition
        value = int_codec.encode(7)
        return Reply(partition=number, positions=(), age_seconds=0.0, served_by="w", value=value, due=True), 1e3

    monkeypatch.setattr(StateReader, "_ask", answer)
    path = private(tmp_path / "tokens.toml", TOKENS)
    with served(stateful(tmp_path, Shop.factory()), str(path)) as monitor:
        for query, table, key in (
            ("key=o1&table=orders", "orders", b"\xfeorders\0o1"),
            ("key=%5B%22ann%22,0,60000%5D&table=clicks", "clicks", b"\xfeclicks\0ann\0"),
        ):
            shown = ask(monitor.port, f"/state?{query}", QUERY).text
            assert "The entry has expired" in shown
            assert (asked[-1].table, (asked[-1].key or b"")[: len(key)]) == (table, key)
        for query, says in (("key=o1", "several structures"), ("key=o1&table=jobs", "no structure")):
            assert says in ask(monitor.port, f"/state?{query}", QUERY).text


def asked_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: dict[int, bytes | Exception], **settings: Any
) -> Any:
    """Return a look at the interface, and one at the page, of members that have these rows of a key."""

    async def answer(self: StateReader[Any, Any], question: Question, timeout_seconds: float) -> tuple[Reply, float]:
        row = rows.get(question.partition)
        if isinstance(row, Exception):
            raise row
        number = question.partition
        return Reply(partition=number, positions=(), age_seconds=0.0, served_by=f"w-{number % 2}", value=row), 1e3

    monkeypatch.setattr(StateReader, "_ask", answer)
    secret = str(private(tmp_path / "secret", "the secret of this group"))
    config = source_of(queries=QueryConfig(secret_file=secret)).config
    source = EventSource(config, Table.factory(key=settings.pop("key", str), value=str), **settings)
    return served(source, str(private(tmp_path / "tokens.toml", TOKENS)))


HOME = partition_of(b"o12", 4)
ELSEWHERE = (HOME + 1) % 4


@pytest.mark.parametrize(
    ("rows", "settings", "query", "note", "proves"),
    [
        ({ELSEWHERE: b"paid"}, {}, "", "", [ELSEWHERE, "w-"]),
        ({HOME: b"a", ELSEWHERE: b"b"}, {}, "", "", [HOME, "w-"]),
        ({}, {}, "", "in none of the 4 partitions", [None, "w-0, w-1"]),
        ({ELSEWHERE: b"a"}, {}, f"&partition={HOME}", f"not in partition {HOME}; no other", [HOME, "w-"]),
        ({ELSEWHERE: b"a"}, {"routed_by": str}, "", f"not in partition {HOME}, where records of this", [HOME, "w-"]),
        (
            {ELSEWHERE: NotOwned("nobody")}, {}, "",
            f"not in partition {HOME}, where records with this key go. Another one may have it, but", [HOME],
        ),
        ({ELSEWHERE: b"a", (HOME + 2) % 4: b"b"}, {}, "", "partitions that have the key too", []),
    ],
    ids=["elsewhere", "home", "nowhere", "named", "declared", "no answer", "two"],
)  # fmt: skip
def test_no_answer_claims_more_than_it_proves(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: dict[int, bytes | Exception],
    settings: dict[str, Any],
    query: str,
    note: str,
    proves: list[Any],
) -> None:
    """Where records have another key than the table, another partition than that of the key may have it."""
    with asked_of(tmp_path, monkeypatch, rows, **settings) as monitor:
        facts = json.loads(ask(monitor.port, f"/api/v1/state?key=o12{query}", QUERY).text)
        assert facts["note"].startswith(note)
        assert facts["found"] == (not note or "too" in note)
        for wanted, name in zip(proves, ("partition", "served_by"), strict=False):
            assert facts[name] == wanted or (name == "served_by" and facts[name].startswith(wanted))
        page = ask(monitor.port, f"/state?key=o12{query}", QUERY).text
        assert ("no such key: " in page, note in page) == (not facts["found"], True)


@pytest.mark.parametrize(
    ("query", "error", "status", "says"),
    [
        *[(f"key=a&{wrong}", None, 400, "the question cannot be read: ") for wrong in (
            "partition=x", "partition=-1", "partition=999999999999", "confirm=maybe", "max_staleness=0",
            "max_staleness=nan", "partition=null", "max_staleness=NULL",
        )],
        ("key=a&partiton=3", None, 400, "there is no parameter 'partiton'; there are: key, key64, table, "),
        ("key=a&partition=4", None, 400, "partition 4: there are 0 to 3"),
        ("", None, 400, "give key or key64"),
        ("key64=*", None, 400, "the key is no base64"),
        ("key=a", NotOwned("no member answers"), 504, "no member answers"),
        ("key=a", NotCaughtUp("not so far"), 504, "not so far"),
        ("key=a", BrokerUnavailable("no broker"), 504, "no broker"),
        ("key=a", StoreError("a store of\x1b your own"), 500, "a store of\\x1b your own"),
    ],
)  # fmt: skip
def test_the_interface_says_by_its_status_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str, error: Exception | None, status: int, says: str
) -> None:
    rows = dict.fromkeys(range(4), error if error is not None else b"1")
    with asked_of(tmp_path, monkeypatch, rows) as monitor:
        reply = ask(monitor.port, f"/api/v1/state?{query}", QUERY)
        assert (reply.status, json.loads(reply.text)["error"].startswith(says)) == (status, True), reply.text
        if "key=" in query and "partiton" not in query:
            assert says[:20] in ask(monitor.port, f"/state?{query}", QUERY).text, "the page shows it"


def test_a_key_of_a_wrong_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with asked_of(tmp_path, monkeypatch, {}, key=int) as monitor:
        reply = ask(monitor.port, "/api/v1/state?key=x", QUERY)
        assert (reply.status, reply.text) == (400, '{"error":"the table has no key of that form"}')
        facts = json.loads(ask(monitor.port, "/api/v1/state?key=7", QUERY).text)
        assert facts["note"] == "in none of the 4 partitions", "no partition follows from the key"


@pytest.mark.parametrize(
    ("store", "has_secret", "problem"),
    [
        (Table.factory(key=str, value=int), False, "need the group&#39;s secret"),
        (Table.factory(key=int, value=int), True, "could not be looked at within"),
        (lambda partition: SimpleStore(partition, codec_for(str), str), True, "only a Table and a Stores are read"),
    ],
)
def test_state_that_cannot_be_looked_up_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Any, has_secret: bool, problem: str
) -> None:
    monkeypatch.setattr(look_up, "OWNER_SECONDS", 0.2)
    path = private(tmp_path / "token", ACT)
    with served(stateful(tmp_path, store, has_secret), str(path)) as monitor:
        assert problem in ask(monitor.port, "/state?key=5").text
        assert ask(monitor.port, "/state").text.count("<form") == 2
