"""The pages and the interface of the monitor: what they show, when they look, and what becomes of hostile texts."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams.model.topology import Topology, TopologyHandler, TopologyTopic
from streams.statistics import (
    CopyStatistics,
    MoveStatistics,
    PartitionStatistics,
    RebalanceStatistics,
    SourceState,
    SourceStatistics,
    StageStatistics,
)
from tests.unit.private_kit import private
from tests.unit.waiting import wait_until
from tests.unit.web_kit import ACT, LOOK, TOKENS, ask, form_of, raw, served, signed_in, source_of

from streams.web import Monitor, api, board, rows  # isort: skip
from streams.web.board import Board, GroupStatus  # isort: skip
from streams.web.drawing import rates_svg, topology_svg  # isort: skip
from streams.web.facts import CommitTimes, MemberFacts  # isort: skip

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202ekey\x00&\"'"


def partition(number: int, state: str = "active", **more: Any) -> PartitionStatistics:
    return PartitionStatistics(number, state, 10, more.pop("queued", 0), 0, more.pop("paused", False), **more)


def member(name: str, *partitions: PartitionStatistics, events: int = 0, **more: Any) -> MemberFacts:
    statistics = SourceStatistics(
        SourceState.RUNNING, name, 1, partitions, events // 10, events, 0, member_id=f"{name}-id", **more
    )
    return MemberFacts(name=name, statistics=statistics, commits=CommitTimes(10, 1, 0.004, 0.02, 0.1))


class Scripted:
    """Members whose facts a test sets; counts the looks at them."""

    def __init__(self, *facts: MemberFacts) -> None:
        self.facts, self.looks = facts, 0

    async def read(self) -> tuple[MemberFacts, ...]:
        self.looks += 1
        return self.facts


@pytest.fixture
def members() -> Scripted:
    return Scripted(member("a", partition(0, end=15), partition(1, "restoring")))


@pytest.fixture
def monitor(tmp_path: Path, members: Scripted) -> Iterator[Monitor]:
    path = private(tmp_path / "tokens.toml", TOKENS)
    made = served(source_of(), str(path))
    made._members = members
    yield made
    made.close()


# -- one status a second, while there are viewers --------------------------------------------------------------------


async def test_all_viewers_share_one_snapshot_a_second(members: Scripted) -> None:
    now = 0.0
    shared = Board("shop", members, None, now=lambda: now)
    found = await asyncio.gather(*(shared.status() for _ in range(20)))
    assert (members.looks, len({id(each) for each in found})) == (1, 1)
    now = 0.99
    assert await shared.status() is found[0]
    now = 1.0
    members.facts = (member("a", partition(0), events=50),)
    later = await shared.status()
    assert (members.looks, later.rates) == (2, (50.0,))
    now = 60.0
    members.facts = (member("a", partition(0), events=109),)
    assert (await shared.status()).rates == (1.0,), "the seconds without a look are not a line of their own"
    shared.close()


def test_without_viewers_nothing_looks(monitor: Monitor, members: Scripted) -> None:
    with monitor:
        with raw(monitor.port) as stream:
            head = "GET /events?page=overview HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
            stream.sendall(f"{head}{LOOK}\r\n\r\n".encode())
            wait_until(lambda: members.looks >= 2, "the stream looks again", step=0.05)
        seen: list[int] = []

        def is_quiet() -> bool:
            seen.append(members.looks)
            return len(seen) > 15 and len(set(seen[-15:])) == 1

        wait_until(is_quiet, "no look for longer than a viewer would wait", step=0.1)


def test_a_stream_brings_what_changes(monitor: Monitor, members: Scripted) -> None:
    with monitor, raw(monitor.port) as stream:
        head = "GET /events?page=source HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        stream.sendall(f"{head}{LOOK}\r\n\r\n".encode())
        received = b""

        def has(text: str) -> bool:
            nonlocal received
            received += stream.recv(65_536)
            return text in received.decode()

        wait_until(lambda: has("restoring"), "the first part", step=0.0)
        members.facts = (member("a", partition(0), partition(1), partition(77)),)
        wait_until(lambda: has("p--77"), "the new partition", step=0.0)


def test_a_stream_ends_with_its_session_and_with_the_monitor(monitor: Monitor) -> None:
    with monitor:
        own, cookie = f"http://127.0.0.1:{monitor.port}", signed_in(monitor.port)
        form = {"form": form_of(monitor.port, cookie)}
        with raw(monitor.port) as stream, raw(monitor.port) as other:
            for each, right in ((stream, f"Cookie: {cookie}"), (other, f"Authorization: Bearer {LOOK}")):
                each.sendall(f"GET /events?page=source HTTP/1.1\r\nHost: localhost\r\n{right}\r\n\r\n".encode())
                assert b"200 OK" in each.recv(65_536)
            ask(monitor.port, "/logout", None, method="POST", body=form, Cookie=cookie, Origin=own)
            while not stream.recv(65_536).endswith(b"0\r\n\r\n"):
                continue
            monitor.close()
            while other.recv(65_536):
                continue


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_a_member_that_does_not_answer_is_shown_as_such(monitor: Monitor, members: Scripted) -> None:
    members.facts += (MemberFacts(name="b", starts=3, problem="no answer within 0.9 s"),)
    with monitor:
        page = ask(monitor.port, "/", LOOK, Accept="text/html").text
        assert "No answer from b." in page
        assert "does not answer" in page
        facts = json.loads(ask(monitor.port, "/api/v1/group", LOOK).text)
        assert [(each["name"], each["answers"]) for each in facts["members"]] == [("a", True), ("b", False)]
        assert facts["totals"]["silent"] == ["b"]
        [note] = facts["notes"]
        assert note.startswith("nothing listens at 127.0.0.1:1")


@pytest.mark.parametrize(
    ("one", "more", "expected"),
    [
        (partition(0), {}, "new records"),
        (partition(0, end=20), {}, "records of the broker"),
        (partition(0, queued=5), {}, "its handlers"),
        (partition(0, queued=5, paused=True), {}, "its handlers: the queue is full"),
        (partition(0, events_ahead=3), {}, "work that runs ahead, of 3 events"),
        (partition(0, "draining"), {}, "draining"),
        (partition(0), {"moves": (MoveStatistics(0, "out", "b", 1, None),)}, "its move out"),
        (partition(0), {"moves": (MoveStatistics(0, "in", "", 1, 3.0),)}, "its move in for 3 s"),
        (
            partition(0, "restoring"),
            {"copies": (CopyStatistics(0, "restoring", 5, 1_005, 1_000, 5, 9, 1.0, 12.0, 0.0),)},
            "its state: 1,000 records left, 12 s",
        ),
    ],
)  # fmt: skip
def test_what_a_partition_waits_for(one: PartitionStatistics, more: dict[str, Any], expected: str) -> None:
    statistics = member("a", one, **more).statistics
    assert statistics is not None
    assert rows.waits_for(one, statistics) == expected


def test_rebalances_are_shown_with_their_causes(monitor: Monitor, members: Scripted) -> None:
    members.facts = (member("a", rebalances=(RebalanceStatistics(7, 1_000, "joined: b"),)),)
    with monitor:
        assert "generation 7: joined: b" in ask(monitor.port, "/source", LOOK).text


def test_timers_and_async_work_that_wait_are_shown(monitor: Monitor, members: Scripted) -> None:
    soon, later = time.time() + 60, 4_000_000_000
    due = (partition(0, timers=74, next_timer_ms=int(soon * 1000)), partition(1, timers=1, next_timer_ms=later * 1000))
    members.facts = (member("a", *due, partition(2), stages=(StageStatistics("Reserved", 4, 15, 19),)),)
    with monitor:
        page = ask(monitor.port, "/source", LOOK).text
        assert f">74<br><small>next {datetime.fromtimestamp(soon):%H:%M:%S}</small>" in page
        assert f">1<br><small>next {datetime.fromtimestamp(later):%Y-%m-%d %H:%M:%S}</small>" in page
        cells = "".join(f'<td class="n">{number}</td>' for number in (4, 15, 19))
        assert f'<th scope="row">a</th><td>Reserved</td>{cells}' in page
        facts = json.loads(ask(monitor.port, "/api/v1/group", LOOK).text)
        assert facts["work"] == [{"member": "a", "name": "Reserved", "running": 4, "waiting": 15, "keys": 19}]
        assert [each["timers"] for each in facts["partitions"]] == [74, 1, 0]


def test_columns_stand_in_line_where_a_partition_has_several_inputs(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell behind a number has more room on its left: so has the cell below it."""
    inputs = tuple(rows.InputProgress(topic, 1, 2, 1) for topic in ("orders", "customers", "payments"))
    line = rows.PartitionLine(topic="", partition=0, owner="a", state="active", inputs=inputs)
    monkeypatch.setattr(rows, "partition_lines", lambda *args: [line])
    with monitor:
        page = ask(monitor.port, "/source", LOOK).text
    found = re.findall(r'<td class="(n[^"]*)"[^>]*>[^\n]*</td>\n<td>(\w+)</td>', page)
    assert [topic for _, topic in found] == ["orders", "customers", "payments"]
    assert 'class="n" colspan="6"' in page


class _Reading(HTMLParser):
    """Collects elements and texts as a browser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str | None] = []
        self.handlers: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        if tag == "script":
            self.scripts.append(dict(attrs).get("src"))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_hostile_texts_are_shown_and_not_obeyed(monitor: Monitor, members: Scripted) -> None:
    members.facts = (
        member(HOSTILE, partition(0), rebalances=(RebalanceStatistics(1, 2**70, HOSTILE),)),
        MemberFacts(name="b", problem=HOSTILE),
    )

    @monitor.action("fails")
    async def fails() -> None:
        raise ValueError(HOSTILE)

    with monitor:
        ask(monitor.port, "/api/v1/actions/fails/start", method="POST")
        for path in ("/", "/source", "/actions", "/views?topic=%3Cscript%3E&key=%1b%00%E2%80%AE"):
            page = _Reading(ask(monitor.port, path, Accept="text/html").text)
            assert page.scripts == ["/static/monitor.js"], path
            assert page.handlers == [], path
            shown = "".join(page.texts)
            assert not set("\x00\x1b\u202e") & set(shown), path
            if path in ("/", "/source", "/actions"):
                assert "<script>alert(1)</script>\\x1b[31m\\u202ekey\\x00" in shown, path


def test_four_hundred_partitions_are_one_page_and_five_thousand_are_many(monitor: Monitor, members: Scripted) -> None:
    members.facts = (member("a", *(partition(number) for number in range(400))),)
    with monitor:
        page = ask(monitor.port, "/source", LOOK).text
        assert page.count("<tbody id=") == 400
    members.facts = (member("a", *(partition(number) for number in range(5_000))),)
    with monitor:
        page = ask(monitor.port, "/source?first=1000", LOOK).text
        assert (page.count("<tbody id="), "p--1000" in page, "first=4500" in page) == (500, True, True)
        for first in ("99999", "-1", "x", "%D9%A1"):
            assert ask(monitor.port, f"/source?first={first}", LOOK).status == 200


def test_numbers_that_are_none_do_no_harm() -> None:
    assert "<polyline" in rates_svg([math.nan, 1.0, math.inf])
    facts = MemberFacts(name="a", commits=CommitTimes(1, 0, math.nan, math.inf, 1.0))
    plain = rows.plain_status(GroupStatus(group="g", at_ms=0, members=(facts,), rates=(math.nan,)), True)
    assert b"NaN" not in msgspec.json.encode(plain)


def test_the_topology_is_drawn_with_names_as_texts() -> None:
    topics = [TopologyTopic(HOSTILE, "source", 4), TopologyTopic("x" * 200, "output", 1)]
    handlers = [TopologyHandler(f"{HOSTILE}{number}", "m.f", "plain") for number in range(40)]
    drawn = str(topology_svg(Topology("shop", tuple(topics), tuple(handlers), (), True)))
    page = _Reading(drawn)
    assert set(page.tags) <= {"svg", "title", "defs", "marker", "path", "g", "rect", "text"}
    assert page.handlers == []
    assert "and 29 more" in drawn


def test_all_that_is_read_is_drawn_on_the_left() -> None:
    purposes = ("source", "input", "table", "lookup", "visits", "loop", "changelog", "dead letters", "output")
    topics = tuple(TopologyTopic(f"the {purpose}", purpose, 1) for purpose in purposes)
    drawn = str(topology_svg(Topology("shop", topics, (), (), True)))
    left = [f"the {purpose}" for purpose in purposes[:5]]
    assert f"shop reads {', '.join(left)}; it keeps" in drawn
    assert drawn.count('<text class="name" x="14"') == len(left)


def test_settings_show_no_secret(tmp_path: Path) -> None:
    path = private(tmp_path / "token", ACT)
    secret = {"sasl.password": "hunter22", "sasl.username": "shop"}
    with served(source_of(client_settings=secret), str(path)) as monitor:
        for where in ("/settings", "/api/v1/settings"):
            text = ask(monitor.port, where).text
            assert "hunter22" not in text
            assert "***" in text


# -- the interface -----------------------------------------------------------------------------------------------------


def test_the_document_describes_every_address(monitor: Monitor) -> None:
    with monitor:
        document = json.loads(ask(monitor.port, "/api/v1/openapi.json", LOOK).text)
        described = {(method, path) for path, methods in document["paths"].items() for method in methods}
        assert described == {(each.method.lower(), api.PREFIX + each.path) for each in api.ENDPOINTS}
        for method, path in sorted(described):
            reply = ask(monitor.port, path.replace("{name}", "none").replace("{topic}", "none"), method=method.upper())
            assert reply.headers["content-type"].startswith("application/json"), path
            assert reply.status in (200, 400, 404, 504), path


def test_probes_and_metrics_are_those_of_the_source(tmp_path: Path) -> None:
    path = private(tmp_path / "token", ACT)
    with served(source_of(), str(path)) as monitor:
        assert ask(monitor.port, "/ready").text == "shop: the source is created\n"
        assert ask(monitor.port, "/ready?max_lag=x").status in (400, 503)
        assert 'kes_source_state{group="shop"' in ask(monitor.port, "/metrics").text


async def test_it_serves_during_a_lifespan(tmp_path: Path) -> None:
    path = private(tmp_path / "token", ACT)
    monitor = served(source_of(), str(path))
    async with monitor.lifespan(object()):
        assert (await asyncio.to_thread(ask, monitor.port, "/live", None)).status == 200
    assert monitor.port == 0
    async with monitor:
        assert monitor.port > 0


def test_the_script_is_short_and_the_only_one() -> None:
    folder = Path(board.__file__).parent
    assert [path.name for path in folder.rglob("*.js")] == ["monitor.js"]
    assert len((folder / "static" / "monitor.js").read_text().splitlines()) < 150
    texts = "".join(path.read_text() for path in folder.rglob("*") if path.suffix in (".html", ".js", ".css"))
    assert "http://" not in texts
    assert "https://" not in texts
    assert "|safe" not in texts.replace(" ", "")
