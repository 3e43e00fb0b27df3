"""``kes reset`` without a broker: there and back, the order of its steps, what is refused, and what an end leaves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams import EventSource, Table
from streams.cli import reset
from streams.cli.state_sources import StateAt
from streams.core.jobs import COUNTER, PREFIX
from streams.core.timers import Timer
from streams.errors import TransactionFailed
from streams.records import Output
from streams.runtime.changelog import (
    BEGIN_KEY,
    JOIN_PREFIX,
    OFFSET_KEY,
    RESET_KEY,
    OffsetRecord,
    decode_offset,
    decode_reset,
    encode_timer,
    further_positions,
    timer_key,
)
from tests.unit.cli_kit import Kes, admin, preset, source_of
from tests.unit.start_kit import CHANGELOG, PLAIN, World, start, world
from tests.vocabulary import INTS

__all__ = ["admin", "start", "world"]  # the fixtures

ROWS = {0: {b"bob": 3, b"carol": 5}, 1: {b"alice": 7}}
JOINED = JOIN_PREFIX + b"names\0bob"
TIMER = timer_key("later")


@pytest.fixture
def run(world: World, start: Kes, kes: Kes, monkeypatch: pytest.MonkeyPatch) -> Kes:
    """The command, for a source that has begun, with a state, a timer and a joined row, and stands at 8 and 5."""
    config = source_of(num_partitions=2, bootstrap_servers="there:1").config
    source: EventSource[Any] = EventSource(config, Table.factory(key=str, value=int))
    source.input("more")
    monkeypatch.setattr(sys.modules["fleet"], "source", source)
    start("--at", "earliest", "--yes")
    for number, found in ROWS.items():
        write(world, number, {**{key: INTS.encode(value) for key, value in found.items()}})
    write(world, 0, {JOINED: b"Bob", TIMER: encode_timer(Timer("later", 99, "Due", b"1"))})
    for number, offset in ((0, 8), (1, 5)):
        move(world, number, offset)
    world.steps.clear()

    def state_of(_: object, side: str, servers: str, timeout: float, numbers: list[int]) -> dict[int, StateAt]:
        assert side == "changelog"
        return {number: StateAt(-1, {}).after(world.records(number)) for number in numbers}

    @contextlib.contextmanager
    def slot_of(config: object, command: str, timeout: float, seconds: float) -> Iterator[World]:
        world.step("take the id")
        yield world

    monkeypatch.setattr(reset, "GroupChecks", lambda config, seconds: world)
    monkeypatch.setattr(reset, "slot_of", slot_of)
    monkeypatch.setattr(reset, "state_of", state_of)
    return preset(kes, "reset", "fleet:source")


def write(world: World, number: int, entries: dict[bytes, bytes | None]) -> None:
    world.written += [Output(CHANGELOG, value, key, None, number, 0, number, -1) for key, value in entries.items()]


def move(world: World, number: int, offset: int, source_id: str = "id of flights") -> None:
    """As a member does it."""
    further = further_positions(None, number, {"more": (2, "id of more")})
    record = OffsetRecord(offset, "m-1", 0, 0, source_id, "id of the changelog", further)
    write(world, number, {OFFSET_KEY: msgspec.json.encode(record)})
    world.offsets.setdefault(("demo", "flights"), {})[number] = offset


def entries(world: World, number: int) -> dict[bytes, bytes]:
    found = StateAt(-1, {}).after(world.records(number)).entries
    return {key: value for key, value in found.items() if key not in (BEGIN_KEY, RESET_KEY)}


def place(world: World, number: int) -> tuple[int, int]:
    record = decode_offset(world.records(number, OFFSET_KEY)[-1])
    further = record.position_in("more", number)
    assert further is not None
    return record.offset, further[0]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "before.jsonl")


def dropping(file: str, *words: str) -> tuple[str, ...]:
    return (*(words or ("--to", "earliest")), "--state", "drop", "--backup", file, "--yes", "--json")


def test_it_goes_there_and_back(world: World, run: Kes, file: str) -> None:
    before = {number: entries(world, number) for number in (0, 1)}
    answer = run(*dropping(file)).data
    assert answer["written"]
    assert [(row["from"], row["to"], row["deleted"], row["timers"]) for row in answer["partitions"]] == [
        (8, 2, 2, 1), (2, 0, 2, 1), (5, 2, 1, 0), (2, 0, 1, 0)
    ]  # fmt: skip
    assert "13 records are handled again: what they send is sent a second time" in answer["warnings"]
    assert "rows of joined tables stay: events that are handled again meet the rows of now" in answer["warnings"]
    assert (entries(world, 0), entries(world, 1)) == ({JOINED: b"Bob"}, {})
    assert (place(world, 0), place(world, 1)) == ((2, 0), (2, 0))
    assert world.offsets == {("demo", "flights"): {0: 2, 1: 2}, ("demo", "more"): {0: 0, 1: 0}}
    record = decode_reset(world.records(0, RESET_KEY)[-1])
    assert (record.was, record.backup) == ({"flights": 8, "more": 2}, file)
    assert record.shown == "reset: flights from 8 to 2, more from 2 to 0"
    assert world.steps == [
        "look at demo",
        "take the id",
        "hold flights",
        "look at demo",
        "hold more",
        "look at demo",
        "send", "send", "send", "send",
        "commit",
    ]  # fmt: skip
    assert run("--restore", file, "--yes", "--json").data["written"]
    assert {number: entries(world, number) for number in (0, 1)} == before
    assert (place(world, 0), place(world, 1)) == ((8, 2), (5, 2))
    assert world.records(0, RESET_KEY)[-1].value is None
    assert "was not reset: there is nothing to undo" in run("--restore", file, "--yes", code=1).words


def test_ids_of_durable_jobs_are_not_given_again(world: World, run: Kes, file: str) -> None:
    """A receiver drops a call whose id it has seen."""
    names = (COUNTER, PREFIX + "1")
    jobs = {timer_key(name): encode_timer(Timer(name, 99, "kes.job", b"1")) for name in names}
    write(world, 1, {**jobs})
    run(*dropping(file))
    assert jobs.keys() & entries(world, 1).keys() == {timer_key(COUNTER)}
    run("--restore", file, "--yes")
    assert jobs.items() <= entries(world, 1).items()


def test_repeating_it_is_harmless(world: World, run: Kes, file: str) -> None:
    run(*dropping(file))
    written = len(world.written)
    assert not run(*dropping(file)).data["written"]
    assert len(world.written) == written


def test_a_member_that_has_run_since_closes_the_way_back(world: World, run: Kes, file: str) -> None:
    run(*dropping(file))
    move(world, 1, 2)  # it has handled nothing, but may have fired a timer
    said = run("--restore", file, "--yes", code=1).words
    assert "flights[1]: a member has run since the reset" in said
    assert "kes state import takes the state from the file" in said


def test_single_partitions_are_reset_with_the_state_that_they_have(world: World, run: Kes, file: str) -> None:
    before = {number: entries(world, number) for number in (0, 1)}
    words = ("--to", "0@10", "--to", "more:0@0", "--state", "keep", "--backup", file, "--yes", "--json")
    answer = run(*words).data
    assert {number: entries(world, number) for number in (0, 1)} == before
    assert (place(world, 0), place(world, 1)) == ((10, 0), (5, 2))
    assert answer["warnings"] == [
        "2 records are handled again: what they send is sent a second time",
        "2 records are passed over: they are not handled",
        "rows of joined tables stay: events that are handled again meet the rows of now",
    ]
    assert run("--restore", file, "--yes", "--json").data["written"]
    assert place(world, 0) == (8, 2)


def test_what_an_empty_state_lacks_is_named(run: Kes) -> None:
    answer = run("--to", "1@4", "--state", "drop", "--dry-run", "--json").data
    lost = "the state begins empty, without the records below the places in flights[1], more[1]"
    assert lost in answer["warnings"]
    assert not answer["written"]


def test_a_dry_run_writes_nothing_and_takes_no_id(world: World, run: Kes) -> None:
    written = len(world.written)
    assert "nothing was written" in run("--to", "earliest", "--state", "drop", "--dry-run").err
    assert (len(world.written), world.steps) == (written, ["look at demo"])


def test_parked_keys_are_refused(run: Kes, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their events are below the position: they would be handled twice, or never."""
    monkeypatch.setattr(reset, "parked_of", lambda *_: SimpleNamespace(keys=SimpleNamespace(events=3)))
    assert "partition 0: 3 events of parked keys wait" in run(*dropping(file), code=1).words


@pytest.mark.parametrize(
    ("wrong", "words", "said"),
    [
        (lambda world: world.members.update({"demo": (PLAIN,)}), ["--to", "earliest"], "group demo is alive"),
        (lambda world: None, ["--to", "0@11"], "flights[0]: 0@11 is offset 11, and the log has 2 to 10 only"),
        (
            lambda world: move(world, 0, 8, source_id="another one"),
            ["--to", "earliest"],
            "flights[0]: the state in demo.flights.changelog belongs to other topics",
        ),
    ],
)
def test_it_is_refused_by_name(
    world: World, run: Kes, file: str, wrong: Callable[[World], Any], words: list[str], said: str
) -> None:
    wrong(world)
    assert said in run(*dropping(file, *words), code=1).words
    assert not Path(file).exists()


def test_a_source_with_a_loop_is_refused(run: Kes, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(num_partitions=2, bootstrap_servers="there:1", loop=True)
    monkeypatch.setattr(sys.modules["fleet"], "source", source)
    assert "has a loop or visits" in run(*dropping(file), code=1).words


def test_partitions_that_have_not_begun_are_at_their_start(world: World, run: Kes, file: str) -> None:
    world.written = [each for each in world.written if each.partition == 0]
    rows = run("--to", "latest", "--state", "keep", "--backup", file, "--yes", "--json").data["partitions"]
    assert [(row["from"], row["to"]) for row in rows if row["topic"] == "flights"] == [(8, 9), (2, 9)]
    assert place(world, 1) == (9, 6)


@pytest.mark.parametrize(
    ("when", "what", "said"),
    [
        ("hold flights", lambda world: world.members.update({"demo": (PLAIN,)}), "group demo is alive"),
        ("hold more", lambda world: move(world, 1, 6), "a member of group demo has run meanwhile"),
    ],
)
def test_who_comes_between_is_seen_before_the_commit(
    world: World, run: Kes, file: str, when: str, what: Callable[[World], Any], said: str
) -> None:
    world.at[when] = lambda: what(world)
    assert said in run(*dropping(file), code=1).words
    assert "commit" not in world.steps
    assert not world.records(0, RESET_KEY)


@pytest.mark.parametrize("when", ["take the id", "hold flights", "hold more", "send", "commit"])
def test_an_end_at_any_step_leaves_nothing_and_the_next_run_resets(
    world: World, run: Kes, file: str, when: str
) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    world.at[when] = end
    before = len(world.written)
    run(*dropping(file), code=130)
    assert (len(world.written), world.sent, world.pending) == (before, [], {})
    world.at.clear()
    assert run(*dropping(file)).data["written"], "the backup of the killed run is the same"


def test_an_answer_that_is_lost_says_to_run_it_again(world: World, run: Kes, file: str) -> None:
    def lost() -> None:
        world.written += world.sent
        raise TransactionFailed("commit_transaction", "_TIMED_OUT", "unknown", "no answer")

    world.at["commit"] = lost
    assert "Whether the source is reset is not known: run it again" in run(*dropping(file), code=1).words
    world.at.clear()
    assert not run(*dropping(file)).data["written"]


def test_a_file_with_another_state_is_not_written_over(world: World, run: Kes, file: str) -> None:
    run(*dropping(file, "--to", "0@4"))
    assert "is there, with another state than that of now: name another file" in run(*dropping(file), code=1).words
    assert "was not reset" not in run("--restore", file, "--yes", "--json").err


def test_a_backup_of_another_reset_is_refused(world: World, run: Kes, tmp_path: Path, file: str) -> None:
    run(*dropping(file))
    other = str(tmp_path / "other.jsonl")
    move(world, 0, 3)
    run(*dropping(other))
    assert (
        f"is not the backup of the last reset, which was written to {other}"
        in run("--restore", file, "--yes", code=1).words
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "earliest"], "say --state drop or --state keep"),
        (["--to", "earliest", "--state", "drop"], "name a file for the state of now with --backup, or say --no-backup"),
        (["--to", "earliest", "--state", "drop", "--backup", "x", "--no-backup"], "with --backup, or say --no-backup"),
        (["--state", "drop", "--no-backup"], "--to: name a place"),
        (["--restore", "x", "--to", "earliest"], "name nothing else"),
        (["--to", "2026-11-20T00:00", "--state", "keep", "--no-backup"], "has no time zone"),
    ],
)
def test_wrong_usage_is_named(run: Kes, words: list[str], said: str) -> None:
    assert said in run(*words, "--yes", code=2).words
