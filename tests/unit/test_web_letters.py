"""Dead letters on the pages: filtered, page by page, and settled as they were chosen. The box of letters is the test's
own; rights and forms are tried in ``test_web_doors.py``."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from streams.errors import BrokerUnavailable
from streams.looks.letters import Letter, Settled
from streams.records import TYPE_HEADER, IncomingRecord
from streams.runtime.partition.dead_letters import PREFIX
from tests.unit.private_kit import private
from tests.unit.waiting import wait_until
from tests.unit.web_kit import QUERY, TOKENS, ask, form_of, served, signed_in, source_of

from streams.web import letters as web_letters  # isort: skip
from streams.web import Monitor  # isort: skip

ODD = "a&b=c<\x1b>"


class Box:
    """The letters of a topic, and its settler."""

    letters: list[Letter]
    sent: list[tuple[str, bool]]
    trouble: Exception | None = None

    def __init__(self, *settings: Any) -> None:
        pass

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def scan(self, receive: Callable[[Letter], None], **more: Any) -> dict[int, Settled]:
        if Box.trouble is not None:
            raise Box.trouble
        for letter in Box.letters:
            receive(letter)
        return defaultdict(Settled)

    def partitions(self, topic: str) -> int:
        return 4

    def originals(self, letters: Any) -> dict[Any, Any]:
        return {letter.position: "" for letter in letters}

    def settler(self) -> Box:
        return self

    def settle(self, pairs: Any, settled: Any) -> int:
        Box.sent += [(str(letter.position), output is not None) for letter, output in pairs]
        return len(pairs)

    def close(self) -> None:
        pass


def letter(partition: int, offset: int, key: str = "k", kind: str = "A", *, is_settled: bool = False) -> Letter:
    facts = {"topic": "orders", "partition": str(partition), "offset": str(offset), "error": "ValueError"}
    headers = [*((PREFIX + name, value.encode()) for name, value in facts.items()), (TYPE_HEADER, kind.encode())]
    record = IncomingRecord("shop.orders.dead-letters", partition, offset, key.encode(), b"{}", headers, 1)
    return Letter(record, offset, is_settled)


@pytest.fixture
def monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    monkeypatch.setattr(web_letters, "LetterBox", Box)
    monkeypatch.setattr(web_letters, "await_listener", lambda *args: None)
    monkeypatch.setattr(web_letters, "problems_of", lambda *args: [])
    # As a topic is read: its partitions by turns.
    Box.letters = [letter(number % 3, number // 3) for number in range(150)]
    Box.letters += [letter(3, 0, ODD, "B"), letter(3, 1, ODD, "A"), letter(3, 2, is_settled=True)]
    Box.sent, Box.trouble = [], None
    with served(source_of(), str(private(tmp_path / "tokens.toml", TOKENS))) as made:
        yield made


def places(page: str) -> list[str]:
    return re.findall(r'name="place" value="([^"]+)"', page)


def test_pages_have_every_letter_once_and_in_order(monitor: Monitor) -> None:
    found, where = [], "/dead-letters"
    while True:
        page = ask(monitor.port, where).text
        assert "152 open" in page
        found += [places(page)]
        following = re.search(r'<a href="([^"]+)">next page', page)
        if following is None:
            break
        assert f"{found[-1][0]} to {found[-1][-1]} shown" in page
        where = following[1].replace("&amp;", "&")
    assert [len(page) for page in found] == [50, 50, 50, 2]
    flat = [tuple(map(int, place.split("@"))) for page in found for place in page]
    assert flat == sorted(flat)
    assert 'href="/dead-letters?">first page' in page
    facts = json.loads(ask(monitor.port, "/api/v1/dead-letters?after=3@0", QUERY).text)
    assert ([each["place"] for each in facts["letters"]], facts["open"], facts["next"]) == (["3@1"], 152, "")


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ("partition=1", 50),
        (f"key={quote(ODD)}", 2),
        (f"key={quote(ODD)}&type=B", 1),
        ("type=none", 0),
        ("key=&type=", 152),
    ],
)
def test_a_filter_chooses(monitor: Monitor, asked: str, count: int) -> None:
    page = ask(monitor.port, f"/dead-letters?{asked}").text
    assert f"{count} open" in page
    assert len(places(page)) == min(count, 50)
    assert json.loads(ask(monitor.port, f"/api/v1/dead-letters?{asked}", QUERY).text)["open"] == count


@pytest.mark.parametrize("wrong", ["partition=x", "partition=-1", "partition=Null", "after=2", "after=a@b"])
def test_a_filter_that_cannot_be_read_is_refused(monitor: Monitor, wrong: str) -> None:
    reply = ask(monitor.port, f"/api/v1/dead-letters?{wrong}", QUERY)
    assert (reply.status, "the filter cannot be read" in reply.text) == (400, True)
    page = ask(monitor.port, f"/dead-letters?{wrong}").text
    assert ("the filter cannot be read" in page, places(page)) == (True, [])


def test_a_cluster_that_does_not_answer_is_no_empty_list(monitor: Monitor) -> None:
    Box.trouble = BrokerUnavailable("no broker answers")
    assert ask(monitor.port, "/api/v1/dead-letters", QUERY).status == 504
    assert "no broker answers" in ask(monitor.port, "/dead-letters").text


ONE, ALL = {"place": ["0@1", "2@3"]}, {"all": "true"}


@pytest.mark.parametrize(
    ("path", "form", "settled", "result"),
    [
        ("replay", ONE, [("0@1", True), ("2@3", True)], "sent again: 2; settled before: 0"),
        ("drop", ONE, [("0@1", False), ("2@3", False)], "dropped: 2; settled before: 0"),
        ("replay", {"place": ["3@2"]}, [], "sent again: 0; settled before: 1"),
        (f"drop?key={quote(ODD)}&partition=", ALL, [("3@0", False), ("3@1", False)], "dropped: 2; left: 0"),
        (f"replay?key={quote(ODD)}&type=B&after=9@9", ALL, [("3@0", True)], "sent again: 1; left: 0"),
        ("replay", {"place": ["7@7"]}, [], "has no dead letter at 7@7"),
        ("replay", {"place": ["x"]}, [], "name letters by PARTITION@OFFSET"),
    ],
)
def test_what_is_chosen_is_settled_and_nothing_else(
    monitor: Monitor, path: str, form: dict[str, Any], settled: list[tuple[str, bool]], result: str
) -> None:
    reply = ask(monitor.port, f"/dead-letters/{path}", method="POST", body={**form, "sure": "true"})
    assert (reply.status, reply.headers["location"]) == (303, "/actions")

    def runs() -> list[dict[str, Any]]:
        found = json.loads(ask(monitor.port, "/api/v1/actions").text)
        return [run for action in found for run in action["runs"]]

    wait_until(lambda: runs()[0]["ended_ms"], "it is done", step=0.02)
    assert (Box.sent, result in runs()[0]["result"]) == (settled, True), runs()


@pytest.mark.parametrize(
    ("path", "form", "status", "says"),
    [
        ("replay", {}, 400, "Choose letters first."),
        ("drop", ONE, 400, "say that you are sure"),
        ("drop", ALL, 400, "say that you are sure"),
        ("drop?partition=x", {**ALL, "sure": "true"}, 400, "the filter cannot be read"),
        ("drop?partiton=1", {**ALL, "sure": "true"}, 400, "there is no filter &#39;partiton&#39;"),
    ],
)
def test_what_is_not_clear_settles_nothing(
    monitor: Monitor, path: str, form: dict[str, Any], status: int, says: str
) -> None:
    reply = ask(monitor.port, f"/dead-letters/{path}", method="POST", body=form)
    assert (reply.status, says in reply.text, Box.sent) == (status, True, [])


def test_a_misspelt_field_of_a_program_chooses_no_more(monitor: Monitor) -> None:
    body = json.dumps({"all": True, "partiton": 3})
    reply = ask(monitor.port, "/api/v1/actions/drop-dead-letters/start", method="POST", body=body)
    assert (reply.status, "partiton" in reply.text, Box.sent) == (400, True, [])


def test_the_form_of_a_browser_carries_the_filter_and_its_session(monitor: Monitor) -> None:
    own, cookie = f"http://127.0.0.1:{monitor.port}", signed_in(monitor.port)
    page = ask(monitor.port, f"/dead-letters?key={quote(ODD)}", None, Cookie=cookie, Accept="text/html").text
    action = re.search(r'action="(/dead-letters/replay[^"]*)"', page)
    assert action is not None
    for given, status in (("", 403), (form_of(monitor.port, cookie), 303)):
        body = {"form": given, "all": "true"}
        assert ask(monitor.port, action[1], None, method="POST", body=body, Cookie=cookie, Origin=own).status == status
    wait_until(lambda: Box.sent == [("3@0", True), ("3@1", True)], "they are sent", step=0.02)
