"""``kes jobs`` without a broker: what is chosen, shown and asked, at owners that answer and where all are stopped. Acts
at real owners are in ``test_job_acts.py``, real transactions in ``broker/test_cli_jobs.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import typer

from streams import AsyncJobScheduler, EventSource, EventSourceConfig, Table
from streams.cli import operating
from streams.cli.skip import Position
from streams.cli.state_sources import StateAt
from streams.core.jobs import JobRecord, Jobs, JobState
from streams.core.parking import NEVER_MS
from streams.errors import ConfigError, NotOwned
from streams.records import IncomingRecord
from streams.runtime.changelog import decode_timer, encode_timer, timer_key
from streams.settings import QueryConfig
from tests.unit.cli_kit import Kes, preset
from tests.unit.private_kit import private

from streams.queries.operating import JobClient  # isort: skip
from streams.runtime.queries.jobs import JobReply, JobRequest, ShownJob  # isort: skip

ODD = "new\nline \x1b[31m é"


class Item(msgspec.Struct):
    url: str


async def deliver(item: Item) -> int:
    return len(item.url)


def record(name: str, number: int, jobs: str = "deliver", item: bytes = b'{"url":"u"}', **fields: Any) -> JobRecord:
    due = fields.pop("due_ms", 2_000)
    state = JobState(jobs, item, 1_000 + number, number=number, id=f"kes-1-0-{number}", **fields)
    return JobRecord.of(f"@job/{name}", due, state, b"\xff" if number else b"key")


JOBS = {
    0: [
        record(ODD, 0, attempts=2, error="Boom: \x1b[2J"),
        record("twice", 1, item=b"\xff", parked=True, due_ms=NEVER_MS),
        record("gone", 2, "former"),
        record("late", 3, cancelled=True),
    ],
    1: [record("twice", 0, order=b"o")],
}


class World:
    """The jobs of two partitions, at owners (``members``) or in a changelog; partition 1 may have no owner."""

    def __init__(self) -> None:
        self.members: tuple[str, ...] = ()
        self.asked: list[JobRequest] = []
        self.gone: set[str] = set()
        self.refusal: Exception | None = None
        self.written: dict[int, dict[str, JobRecord]] = {}
        self.jobs = {number: Jobs([*jobs, counter()]) for number, jobs in JOBS.items()}

    def __call__(self, config: EventSourceConfig, seconds: float) -> World:
        return self

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None: ...

    def described(self, group: str) -> Any:
        return SimpleNamespace(members=self.members)

    def refuse_if_alive(self) -> None:
        assert not self.members

    def committed(self, numbers: list[int]) -> dict[int, int]:
        return dict.fromkeys(numbers, 7)

    def state_of(
        self, source: Any, side: str, servers: str, timeout: float, numbers: list[int] | None
    ) -> dict[int, StateAt]:
        return {
            number: StateAt(9, {timer_key(one.name): encode_timer(one) for one in (*JOBS[number], counter())})
            for number in (JOBS if numbers is None else numbers)
        }

    async def ask(self, client: JobClient, request: JobRequest, seconds: float) -> tuple[JobReply, float]:
        if self.refusal is not None and (request.action != "list" or request.partition):
            raise self.refusal
        self.asked.append(request)
        found = [ShownJob.of(one, with_item=True) for one in request.listed(self.jobs[request.partition])]
        done = tuple(name for name, _, _ in request.seen if name not in self.gone)
        shown = tuple(found) if request.action == "list" else ()
        return JobReply(partition=request.partition, served_by="w", found=shown, done=done), 0.0

    def write(self, number: int, position: Position, changes: dict[bytes, bytes | None]) -> None:
        assert position == Position(7, 7, None)
        timers = [decode_timer(IncomingRecord("", number, 0, key, value, None))[1] for key, value in changes.items()]
        jobs = Jobs([*(one for one in timers if one is not None), counter()])
        self.written[number] = {one.job_name: one for one in jobs.by_name.values()}


def counter() -> Any:
    made = Jobs()
    made.next = 10
    return made.counter


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    world = World()
    queries = QueryConfig(secret_file=str(private(tmp_path / "secret", "the secret of this group")))
    config = EventSourceConfig(
        group_id="g", topic="t", num_partitions=2, bootstrap_servers="127.0.0.1:1", queries=queries
    )
    source = EventSource(config, store=Table.factory(key=str, value=int))
    AsyncJobScheduler(source, deliver)
    vars(module := ModuleType("hooks")).update(source=source)
    monkeypatch.setitem(sys.modules, "hooks", module)

    @contextmanager
    def slot_of(config: object, command: str, timeout: float) -> Iterator[None]:
        assert command == "kes-jobs"
        yield None

    def stopped(config: object, checks: object, slot: object, number: int, committed: int) -> Any:
        return SimpleNamespace(write=lambda position, changes: world.write(number, position, changes))

    monkeypatch.setattr(operating, "GroupChecks", world)
    monkeypatch.setattr(operating, "state_of", world.state_of)
    monkeypatch.setattr(operating, "position_of", lambda *_: Position(7, 7, None))
    monkeypatch.setattr(operating, "slot_of", slot_of)
    monkeypatch.setattr(operating, "StoppedPartition", stopped)
    monkeypatch.setattr(JobClient, "_ask", lambda client, request, seconds: world.ask(client, request, seconds))
    return world


@pytest.fixture
def jobs(kes: Kes, world: World) -> Kes:
    return preset(kes, "jobs")


AT = "hooks:source"


@pytest.mark.parametrize("members", [(), ("m",)], ids=["changelog", "owners"])
def test_jobs_are_listed_and_shown(world: World, jobs: Kes, members: tuple[str, ...]) -> None:
    """From either side the same, but for what only one of them knows."""
    world.members = members
    rows = jobs("list", AT, "--json", code=1).data["jobs"]
    assert [(row["partition"], row["name"]) for row in rows] == [
        (0, ODD), (0, "twice"), (0, "gone"), (0, "late"), (1, "twice"),
    ]  # fmt: skip
    unknown = "waiting" if members else "unknown"  # these owners say that they know it
    assert [row["state"] for row in rows] == ["waiting", "parked", unknown, "cancelled", "waiting"]
    assert [row["next_attempt_ms"] for row in rows[:2]] == [2_000, None]
    text = jobs("list", AT, "-p", "0", code=1).out
    assert ("\x1b" not in text, r"new\nline \x1b[31m é" in text, "Boom" in text) == (True, True, True)
    assert [row["name"] for row in jobs("list", AT, "--jobs", "former", "--json", code=1).data["jobs"]] == ["gone"]
    assert jobs("list", AT, "--jobs", "none", "--json").data == {"jobs": []}
    assert len(jobs("list", AT, "--parked", "--json", code=1).data["jobs"]) == 1
    shown = jobs("show", AT, ODD, "--json").data
    assert (shown["item"], shown["key"], shown["attempts"], shown["problem"]) == ({"url": "u"}, "key", 2, "")
    assert "\x1b" not in jobs("show", AT, ODD).out
    shown = jobs("show", AT, "--id", "kes-1-0-1", "--json").data
    assert (shown["item"], "malformed" in shown["problem"]) == ({"base64": "/w=="}, True)
    assert "does not define these jobs" in jobs("show", AT, "gone", "--json").data["problem"]
    assert (
        "partitions 0, 1 have a job of this name: choose one with --partition"
        in jobs("show", AT, "twice", code=1).words
    )
    assert jobs("show", AT, "twice", "-p", "1", "--json").data["order"] == "o"
    assert "there is no such job (any more)" in jobs("show", AT, "other", code=1).words


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("show", AT), 2, "name the job by its NAME or by its --id"),
        (("show", AT, "a", "--id", "b"), 2, "name the job by its NAME or by its --id"),
        (("retry", AT), 2, "name the job by its NAME or by its --id"),
        (("cancel", AT, "a", "--all", "--yes"), 2, "choose NAME, --id, or --all"),
        (("cancel", AT, "a", "--jobs", "deliver", "--yes"), 2, "choose some of --all"),
        (("cancel", AT, "a", "--json"), 2, "--json needs --yes"),
        (("show", AT, os.fsdecode(b"\xff\xfe")), 2, "text in UTF-8"),
        (("show", AT, "--id", os.fsdecode(b"\xff")), 2, "text in UTF-8"),
        (("show", AT, "n" * 501), 1, "no such job"),
        (("list", AT, "-p", "2"), 1, "t has the partitions 0 to 1, not 2"),
        (("list", AT, "-p", "-1"), 2, "greater than or equal to 0"),
        (("cancel", AT, "twice", "-p", "7", "--yes"), 1, "t has the partitions 0 to 1, not 7"),
        (("cancel", AT, "late", "--yes"), 1, "no such job (any more), or it is cancelled"),
    ],
)
def test_what_is_not_clear_is_refused(world: World, jobs: Kes, words: tuple[str, ...], code: int, says: str) -> None:
    assert says in jobs(*words, code=code).words
    assert (world.written, world.asked) == ({}, [])


def test_acts_in_the_place_of_stopped_owners(world: World, jobs: Kes) -> None:
    answer = jobs("cancel", AT, ODD, "--yes", "--json").data
    assert (answer["action"], [row["name"] for row in answer["jobs"]]) == ("cancel", [ODD])
    assert [one.state.cancelled for one in world.written.pop(0).values()] == [True]
    jobs("retry", AT, "--id", "kes-1-0-1", "-p", "0", "--yes")
    [one] = world.written.pop(0).values()
    assert (one.job_name, one.state.parked, one.due_ms < NEVER_MS, one.state.attempts) == ("twice", False, True, 0)
    jobs("cancel", AT, "--all", "--jobs", "former", "--yes")
    assert [*world.written.pop(0)] == ["gone"]
    jobs("retry", AT, "--all", "--yes")
    assert {number: [*each] for number, each in world.written.items()} == {0: [ODD, "twice", "gone"], 1: ["twice"]}


@pytest.mark.parametrize("members", [(), ("m",)], ids=["stopped", "owners"])
@pytest.mark.parametrize("end", ["n", "Ctrl-C"])
def test_what_is_not_confirmed_is_not_done(
    world: World, jobs: Kes, monkeypatch: pytest.MonkeyPatch, members: tuple[str, ...], end: str
) -> None:
    world.members = members

    def confirm(text: str, **_: Any) -> None:
        assert text == "These jobs end without a result. Continue?"
        raise KeyboardInterrupt if end == "Ctrl-C" else typer.Abort

    monkeypatch.setattr(typer, "confirm", confirm)
    assert r"new\nline" in jobs("cancel", AT, ODD, code=130 if end == "Ctrl-C" else 1).err
    assert (world.written, [each for each in world.asked if each.action != "list"]) == ({}, [])


def test_acts_at_owners(world: World, jobs: Kes) -> None:
    """Each names what was seen. What was not done is not said to be."""
    world.members = ("m",)
    answer = jobs("retry", AT, "twice", "-p", "0", "--yes", "--json").data
    assert [row["id"] for row in answer["jobs"]] == ["kes-1-0-1"]
    assert world.asked[-1].seen == (("twice", 1, 1_001),)
    world.gone = {"twice"}
    assert "the job is another one by now, or has gone" in jobs("retry", AT, "twice", "-p", "0", "--yes", code=1).words
    rows = jobs("retry", AT, "--all", "--yes", "--json").data["jobs"]
    assert [row["name"] for row in rows] == [ODD, "gone", "late"]
    world.refusal = ConfigError("w: this member does not take operators' acts: QueryConfig.operate is not set")
    assert "QueryConfig.operate is not set" in jobs("cancel", AT, ODD, "-p", "0", "--yes", code=1).words
    world.refusal = NotOwned("t[1]: no answer within 1 s")
    assert (
        "It may have been carried out: see kes jobs list" in jobs("cancel", AT, ODD, "-p", "0", "--yes", code=1).words
    )
    assert "no answer within 1 s" in jobs("cancel", AT, ODD, "--yes", code=1).words
    listed = jobs("list", AT, "--json", code=1)
    assert ("read from the changelog: t[1]: no answer" in listed.words, len(listed.data["jobs"])) == (True, 5)


def test_without_a_secret_running_members_take_no_acts(
    world: World, jobs: Kes, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.members = ("m",)
    source = EventSource(EventSourceConfig(group_id="g", topic="t", num_partitions=2, bootstrap_servers="127.0.0.1:1"))
    monkeypatch.setattr(sys.modules["hooks"], "source", source)
    assert "members that run: stop them all first" in jobs("cancel", AT, ODD, "--yes", code=1).words
    assert len(jobs("list", AT, "--json", code=1).data["jobs"]) == 5  # from the changelog
