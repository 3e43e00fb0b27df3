"""Parked keys on the pages: shown harmlessly, and acted on as they were chosen. The owners' answers are the test's own;
rights and forms are tried in ``test_web_doors.py``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.core.parking import NEVER_MS
from streams.errors import NotOwned
from streams.settings.groups import QueryConfig
from tests.unit.private_kit import private
from tests.unit.test_web_state import HOSTILE
from tests.unit.waiting import wait_until
from tests.unit.web_kit import QUERY, TOKENS, ask, served, source_of

from streams.queries.operating import ParkedClient  # isort: skip
from streams.runtime.queries.parked import ParkedQueue, ParkedReply, ParkedRequest  # isort: skip
from streams.web import Monitor  # isort: skip

KEYS = [HOSTILE.encode(), b"new\nline", b"\xff\xfe", None, b"k" * 256]


def queue(number: int, key: bytes | None = b"k", **fields: Any) -> ParkedQueue:
    known: dict[str, Any] = {
        "queue": f"{number:032x}", "key": key, "key_bytes": 1000 if key == KEYS[-1] else len(key or b""), "head": 7,
        "next": 10, "size": 5, "since_ms": 1000 - number, "attempts": 2, "due_ms": NEVER_MS, "error": HOSTILE,
        "handler": "bank.on_add",
    }  # fmt: skip
    return ParkedQueue(**{**known, **fields})


class Owners:
    """The queues of partition 0, and what was asked of it; partition 3 has no owner."""

    queues: list[ParkedQueue]
    asked: list[ParkedRequest]
    gone: set[str]


@pytest.fixture
def monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    Owners.queues, Owners.asked, Owners.gone = [queue(n, key) for n, key in enumerate(KEYS)], [], set()

    async def answer(self: ParkedClient, request: ParkedRequest, seconds: float) -> tuple[ParkedReply, float]:
        if request.partition == 3:
            raise NotOwned(f"orders[3]: no answer: {HOSTILE}")
        if request.action != "list":
            Owners.asked.append(request)
        queues = Owners.queues if request.partition == 0 else []
        done = tuple(name for name, _, _ in request.seen if name not in Owners.gone)
        count = len(queues)
        common: dict[str, Any] = {"queues": tuple(queues), "done": done, "keys": count, "events": 3 * count}
        return ParkedReply(partition=request.partition, served_by="w-0", **common), 0.0

    monkeypatch.setattr(ParkedClient, "_ask", answer)
    secret = str(private(tmp_path / "secret", "the secret of this group"))
    source = source_of(queries=QueryConfig(secret_file=secret))
    with served(source, str(private(tmp_path / "tokens.toml", TOKENS))) as made:
        yield made


def places(page: str) -> list[str]:
    return re.findall(r'name="place" value="([^"]+)"', page)


def test_keys_are_shown_as_text_with_nothing_that_could_be_obeyed(monitor: Monitor) -> None:
    page = ask(monitor.port, "/parked-keys").text
    assert not set("\x00\x1b\u202e") & set(page)
    assert "<script>alert" not in page
    for text in (
        "5 parked keys, 15 events waiting",
        r"new\nline",
        "base64",
        ">null<",
        "(1,000 bytes)",
        "by a new owner",
    ):
        assert text in page, text
    assert "1 of 4 partitions are not known: orders[3]: no answer" in page
    assert places(page)[0] == f"0-{4:032x}-7-10", "the oldest"
    assert places(ask(monitor.port, "/parked-keys", QUERY).text) == [], "it may not act"
    facts = json.loads(ask(monitor.port, "/api/v1/parked-keys", QUERY).text)
    assert (facts["parked_keys"], [each["since_ms"] for each in facts["queues"]]) == (5, [996, 997, 998, 999, 1000])
    Owners.queues = [queue(number) for number in range(150)]
    page = ask(monitor.port, "/parked-keys").text
    assert (len(places(page)), "150 parked keys, 450 events waiting; the 100 that wait longest" in page) == (100, True)


def runs(monitor: Monitor) -> list[dict[str, Any]]:
    found = json.loads(ask(monitor.port, "/api/v1/actions").text)
    return [run for action in found for run in action["runs"]]


@pytest.mark.parametrize("deed", ["retry", "skip-head", "drop"])
def test_what_is_chosen_is_acted_on_as_it_was_shown(monitor: Monitor, deed: str) -> None:
    chosen = places(ask(monitor.port, "/parked-keys").text)[:2]
    Owners.gone = {f"{3:032x}"}
    form = {"place": chosen, "deed": deed, "sure": "true", "letters": "true"}
    reply = ask(monitor.port, "/parked-keys/act", method="POST", body=form)
    assert (reply.status, reply.headers["location"]) == (303, "/actions")
    wait_until(lambda: runs(monitor)[0]["ended_ms"], "it is done", step=0.02)
    assert runs(monitor)[0]["result"] == f"{deed}: 1 of 2 queues; other ones by now: 1"
    (request,) = Owners.asked
    assert (request.action, request.partition, request.as_letters) == (deed, 0, deed != "retry")
    assert request.seen == ((f"{4:032x}", 7, 10), (f"{3:032x}", 7, 10))


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"deed": "retry"}, "Choose keys first."),
        ({"deed": "drop", "place": "0-x-1-2"}, "say that you are sure"),
        ({"deed": "delete", "place": "0-x-1-2", "sure": "true"}, "Invalid enum value"),
        ({"place": "0-x-1-2", "sure": "true"}, "Invalid enum value"),
    ],
)
def test_what_is_not_clear_acts_on_nothing(monitor: Monitor, form: dict[str, Any], says: str) -> None:
    reply = ask(monitor.port, "/parked-keys/act", method="POST", body=form)
    assert (reply.status, says in reply.text, Owners.asked) == (400, True, []), reply.text


@pytest.mark.parametrize("place", ["", "0-x-1-2", f"0-{1:032x}-1", f"-1-{1:032x}-1-2", f"0-{1:032X}-1-2\n"])
def test_a_place_that_is_none_fails_the_run(monitor: Monitor, place: str) -> None:
    form = {"place": place, "deed": "retry"}
    assert ask(monitor.port, "/parked-keys/act", method="POST", body=form).status == 303
    wait_until(lambda: runs(monitor)[0]["ended_ms"], "it is done", step=0.02)
    assert ("name queues by their places" in runs(monitor)[0]["result"], Owners.asked) == (True, [])


def test_without_the_secret_of_the_group_the_page_says_so(tmp_path: Path) -> None:
    with served(source_of(), str(private(tmp_path / "tokens.toml", TOKENS))) as made:
        assert "set QueryConfig.secret_file" in ask(made.port, "/parked-keys").text
        assert ask(made.port, "/api/v1/parked-keys").status == 404
