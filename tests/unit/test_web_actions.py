"""Actions of the monitor: their forms, one run at a time, cancel, progress, history, log."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from streams.errors import RegistrationError
from tests.unit.private_kit import private
from tests.unit.waiting import wait_until
from tests.unit.web_kit import LOOK, TOKENS, ask, form_of, served, signed_in, source_of

from streams.web import ActionRun, Monitor  # isort: skip
from streams.web.actions import RegisteredAction  # isort: skip
from streams.web.group_client import GroupClient  # isort: skip
from streams.web.letters import DeadLetters  # isort: skip
from streams.web.monitor import WebOptions  # isort: skip


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Monitor]:
    path = private(tmp_path / "tokens.toml", TOKENS)
    made = served(source_of(), str(path))
    yield made
    made.close()


class Mode(enum.Enum):
    """How much."""

    ALL = "all"
    SOME = "some"


class Rebuild(msgspec.Struct, frozen=True):
    """An argument with fields of each kind."""

    name: str
    number: int = 5
    share: float = 0.5
    dry: bool = False
    mode: Mode = Mode.ALL
    kind: Literal["a", "b"] = "a"
    until: int | None = None
    tags: list[str] = []


@dataclasses.dataclass
class Plain:
    """The same as a dataclass."""

    name: str
    number: int = 5


def test_a_form_is_made_of_the_argument() -> None:
    async def rebuild(order: Rebuild) -> None: ...

    found = [
        (field.name, field.kind, field.is_needed, field.default) for field in RegisteredAction("a", rebuild).fields
    ]
    assert found == [
        ("name", "text", True, ""),
        ("number", "number", False, "5"),
        ("share", "number", False, "0.5"),
        ("dry", "checkbox", False, ""),
        ("mode", "select", False, "all"),
        ("kind", "select", False, "a"),
        ("until", "number", False, ""),
        ("tags", "json", False, ""),
    ]

    async def plain(order: Plain, run: ActionRun) -> None: ...

    assert [field.name for field in RegisteredAction("b", plain).fields] == ["name", "number"]


def test_an_action_that_cannot_be_one_is_refused(monitor: Monitor) -> None:
    async def two(first: Rebuild, second: Rebuild) -> None: ...
    async def wrong(number: int) -> None: ...
    def no_coroutine() -> None: ...
    async def good() -> None: ...

    for function in (two, wrong, no_coroutine):
        with pytest.raises(RegistrationError):
            monitor.action("an-action")(function)  # type: ignore[type-var]
    for name in ("", "Upper", "a b", "../x", "replay-dead-letters", "act-on-parked-keys", "a" * 64):
        with pytest.raises(RegistrationError):
            monitor.action(name)(good)
    monitor.action("good")(good)
    with pytest.raises(RegistrationError, match="already"):
        monitor.action("good")(good)
    with monitor, pytest.raises(RegistrationError, match="too late"):
        monitor.action("late")(good)


def test_an_action_runs_once_at_a_time_is_cancelled_and_remembered(
    monitor: Monitor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    release = threading.Event()

    @monitor.action("rebuild")
    async def rebuild(order: Rebuild, run: ActionRun) -> str:
        """Rebuild it.

        Details.
        """
        run.progress(3, 10, order.name)
        while not release.is_set():
            await asyncio.sleep(0.01)
        if order.name == "bad":
            raise ValueError("it is bad")
        return f"{order.number} {order.mode.value} {order.dry} {order.tags}"

    def runs() -> list[dict[str, Any]]:
        found = json.loads(ask(monitor.port, "/api/v1/actions", LOOK).text)
        return next(action["runs"] for action in found if action["name"] == "rebuild")

    def start(**argument: Any) -> int:
        return ask(monitor.port, "/api/v1/actions/rebuild/start", method="POST", body=json.dumps(argument)).status

    def last(state: str) -> dict[str, Any]:
        wait_until(lambda: runs()[0]["state"] == state, state, step=0.02)
        return runs()[0]

    with monitor:
        assert start(number=1) == 400, "without its name"
        assert start(name="a", number="many") == 400
        assert ask(monitor.port, "/api/v1/actions/rebuild/start", method="POST", body="[1").status == 400
        assert start(name="a", number=7) == 200
        assert start(name="b") == 409
        assert (runs()[0]["done"], runs()[0]["total"], runs()[0]["text"]) == (3, 10, "a")
        page = ask(monitor.port, "/actions", Accept="text/html").text
        assert 'max="10" value="3"' in page
        assert "Rebuild it." in page
        assert ask(monitor.port, "/api/v1/actions/rebuild/cancel", method="POST").text == '{"cancelled":true}'
        assert last("cancelled")["who"] == "worker at 127.0.0.1"
        assert ask(monitor.port, "/api/v1/actions/rebuild/cancel", method="POST").text == '{"cancelled":false}'
        release.set()
        cookie, own = signed_in(monitor.port), f"http://127.0.0.1:{monitor.port}"
        form = {"form": form_of(monitor.port, cookie), "action": "rebuild"}
        fields = {
            "field-name": "c",
            "field-number": "8",
            "field-dry": "on",
            "field-mode": "some",
            "field-tags": '["x"]',
        }
        sent = {"method": "POST", "Cookie": cookie, "Origin": own}
        assert ask(monitor.port, "/actions/start", None, body={**form, **fields}, **sent).status == 303  # type: ignore[arg-type]
        assert last("done")["result"] == "8 some True ['x']"
        for wrong in ({"field-number": "<b>"}, {"field-tags": "["}, {"field-mode": "none"}):
            reply = ask(monitor.port, "/actions/start", None, body={**form, **fields, **wrong}, **sent)  # type: ignore[arg-type]
            assert reply.status == 400
        assert start(name="bad") == 200
        assert last("failed")["result"] == "ValueError: it is bad"
        for _ in range(25):
            assert start(name="d") == 200
            last("done")
        assert [run["number"] for run in runs()] == list(range(28, 8, -1)), "the last twenty"
    assert "action rebuild, run 1: started by worker at 127.0.0.1" in caplog.text
    assert "action rebuild, run 1: cancelled by worker at 127.0.0.1" in caplog.text


def test_the_end_of_the_monitor_cancels_what_runs(monitor: Monitor) -> None:
    ended: list[str] = []

    @monitor.action("endless")
    async def endless() -> None:
        try:
            await asyncio.sleep(3_600)
        finally:
            ended.append("cancelled")

    with monitor:
        assert ask(monitor.port, "/api/v1/actions/endless/start", method="POST").status == 200
    assert ended == ["cancelled"]


async def test_a_run_that_is_cancelled_before_it_began_has_ended() -> None:
    async def wait() -> None:
        await asyncio.sleep(0)

    action = RegisteredAction("wait", wait)
    run = action.start({}, "a test")
    assert action.cancel("a test")
    await asyncio.sleep(0.01)
    assert (run.state, action.running) == ("cancelled", None)
    action.start({}, "a test")


def test_an_action_that_exits_ends_itself_alone(monitor: Monitor) -> None:
    @monitor.action("leave")
    async def leave() -> None:
        raise SystemExit(3)

    def last() -> dict[str, Any]:
        found = json.loads(ask(monitor.port, "/api/v1/actions", LOOK).text)
        return next(action["runs"][0] for action in found if action["name"] == "leave")

    with monitor:
        assert ask(monitor.port, "/api/v1/actions/leave/start", method="POST").status == 200
        wait_until(lambda: last()["ended_ms"] is not None, "its end", step=0.02)
        assert (last()["state"], last()["result"]) == ("failed", "SystemExit: 3")


def test_a_source_that_does_not_run_cannot_be_drained(monitor: Monitor) -> None:
    """That it can be while it runs: ``tests/broker/test_web.py``."""
    path = "/api/v1/actions/drain-this-member/start"
    with monitor:
        assert ask(monitor.port, path, LOOK, method="POST").status == 403
        assert ask(monitor.port, path, method="POST").status == 200

        def last() -> dict[str, Any]:
            found = json.loads(ask(monitor.port, "/api/v1/actions", LOOK).text)
            return next(action["runs"][0] for action in found if action["name"] == "drain-this-member")

        wait_until(lambda: last()["state"] == "failed", "it is refused", step=0.02)
        assert last()["result"].endswith("the source is created, not running")
    monitor.serve_for(WebOptions(address="127.0.0.1:0"), None, None)  # as kes web does
    with monitor:
        token = monitor.link.partition("#")[2]
        assert ask(monitor.port, path, token, method="POST").status == 404, "it runs nothing"


async def test_no_cancel_hides_that_letters_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def settle(self: DeadLetters, *order: Any) -> str:
        release.wait(10.0)
        return "sent again: 1"

    monkeypatch.setattr(DeadLetters, "_settle", settle)
    source = source_of()
    action = RegisteredAction("again", DeadLetters(source, GroupClient("shop", source.config)).replay)
    run = action.start({"places": ["0@1"]}, "a test")
    for _ in range(3):
        await asyncio.sleep(0.01)
        action.cancel("a test")
    await asyncio.sleep(0.01)
    assert action.running is run, "it is being sent"
    release.set()
    assert run.task is not None
    await run.task
    assert (run.state, run.result) == ("done", "sent again: 1")
