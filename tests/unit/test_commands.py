"""Commands in a whole source: one effect an id, answers that are kept, versions without gap, over what may happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, PARK, SKIP, EventContext, EventSource, EventSourceConfig, Retry, Table
from streams.errors import (
    CommandFailed,
    ConfigError,
    EventFailure,
    IdReused,
    NotKnown,
    NotOwned,
    Parked,
    RecordError,
    RegistrationError,
    Rejected,
    VersionConflict,
)
from streams.model.commands import Versioned
from streams.queries.commands import CommandClient
from streams.records import Headers
from streams.runtime.queries.commands import CommandAnswer, CommandQuestion, answered, checked_question
from streams.stores import Aggregate
from streams.testing import TestDriver
from tests.unit.commands_kit import OUT, Move, Moved, Purse, build, gapless, versions
from tests.vocabulary import Added, config_of

pytestmark = pytest.mark.usefixtures("quiet")


def balance(driver: TestDriver[Any], key: str) -> Versioned[Purse] | None:
    found = [store.get(key) for store in driver.stores().values()]
    return next((one for one in found if one is not None), None)


def test_a_command_has_an_answer_an_effect_and_numbered_events() -> None:
    with TestDriver(build()) as driver:
        done = driver.ask(Move(5, 2), key="ada", id="1")
        assert (done.version, done.count, done.events) == (2, 2, (Moved(5), Moved(5)))
        assert driver.ask(Move(0, 0), key="ada", id="2").version == 2, "no events, no version"
        assert driver.ask(Move(-3), key="ada", id="3", expected_version=2).version == 3
        assert driver.ask(Move(1), key="bob", id="4", expected_version=0).version == 1
        with pytest.raises(Rejected, match="not enough") as rejected:
            driver.ask(Move(-8), key="ada", id="5")
        assert rejected.value.data == {"cents": 7}
        with pytest.raises(VersionConflict) as conflict:
            driver.ask(Move(1), key="ada", id="6", expected_version=2)
        assert conflict.value.version == 3
        assert gapless(driver) == {"ada": 3, "bob": 1}
        assert (balance(driver, "ada"), balance(driver, "bob")) == (Versioned(3, Purse(7)), Versioned(1, Purse(1)))
        driver.check()


def lose_a_commit(driver: TestDriver[Any]) -> None:
    driver.lose_reply("commit")


def abort(driver: TestDriver[Any]) -> None:
    driver.abort()


def kill(driver: TestDriver[Any]) -> None:
    driver.crash(driver.members[0])
    driver.restart()


def move(driver: TestDriver[Any]) -> None:
    driver.join()
    driver.leave(driver.members[0])


def refuse(driver: TestDriver[Any]) -> None:
    driver.refuse("commit")


@pytest.mark.parametrize("happens", [None, lose_a_commit, abort, kill, move, refuse])
def test_the_same_id_has_one_effect_and_one_answer(happens: Callable[[Any], None] | None) -> None:
    """Also of answers that turn it down, though they would be others by now."""
    with TestDriver(build(num_standbys=1)) as driver:
        if happens in (lose_a_commit, abort, refuse):
            happens(driver)  # to the command itself
        first = driver.ask(Move(5, 3), key="ada", id="1")
        with pytest.raises(Rejected) as before:
            driver.ask(Move(-20), key="ada", id="2")
        with pytest.raises(VersionConflict):
            driver.ask(Move(1), key="ada", id="3", expected_version=4)
        if happens is not None:
            happens(driver)
        assert driver.ask(Move(50), key="ada", id="4").version == 4
        for _ in range(2):
            again = driver.ask(Move(5, 3), key="ada", id="1")
            assert (again.version, again.count, again.events) == (first.version, first.count, first.events)
            with pytest.raises(Rejected) as rejected:
                driver.ask(Move(-20), key="ada", id="2")
            assert rejected.value.data == before.value.data
            with pytest.raises(VersionConflict) as conflict:
                driver.ask(Move(1), key="ada", id="3", expected_version=4)
            assert conflict.value.version == 3
        assert gapless(driver) == {"ada": 4}
        driver.check()


@pytest.mark.parametrize(
    ("command", "key", "expected"), [(Move(6), "ada", None), (Move(5), "bob", None), (Move(5), "ada", 0)]
)
def test_an_id_of_another_command_has_no_effect(command: Move, key: str, expected: int | None) -> None:
    with TestDriver(build(partitions=1)) as driver:
        driver.ask(Move(5), key="ada", id="1")
        with pytest.raises(IdReused):
            driver.ask(command, key=key, id="1", expected_version=expected)
        assert gapless(driver) == {"ada": 1}
        assert driver.ask(Move(5), key="ada", id="1").version == 1, "the first one stands"


def test_copies_in_one_slice_have_one_effect() -> None:
    source = build(partitions=1)
    with TestDriver(source) as driver:
        for number in range(20):
            headers: Headers = [("kes-id", b"%d" % (number % 3))]
            driver.send(Move(1), key="ada", headers=headers, wait=False)
        driver.settle()
        assert gapless(driver) == {"ada": 3}
        driver.check()


def test_an_id_is_forgotten_behind_its_time() -> None:
    """What is older than ``remember`` is a new command, at the latest when it is asked again: the guide says so."""
    with TestDriver(build(remember=timedelta(minutes=10))) as driver:
        driver.ask(Move(5), key="ada", id="1")
        driver.advance(500)
        assert driver.ask(Move(5), key="ada", id="1").version == 1
        driver.advance(1000)
        with suppress(CommandFailed):  # the record meets the id, which goes right behind it
            driver.ask(Move(5), key="ada", id="1")
        assert driver.ask(Move(5), key="ada", id="1").version == 2
        assert gapless(driver) == {"ada": 2}


# -- failures ----------------------------------------------------------------------------------------------------------


class Bad:
    """A decide that is broken until it is repaired."""

    is_broken = True

    def __call__(self, purse: Purse, command: Move) -> list[Moved]:
        if self.is_broken:
            raise RuntimeError("broken")
        return [Moved(command.cents)]


@pytest.mark.parametrize("policy", [SKIP, DEAD_LETTER, Retry(attempts=3, backoff_seconds=0.1, then=SKIP.then)])
def test_a_command_that_has_failed_has_no_effect_and_its_id_is_free(policy: Retry) -> None:
    bad = Bad()
    with TestDriver(build(deeds={"bad": bad}, on_error=policy)) as driver:
        driver.ask(Move(1), key="ada", id="0")
        with pytest.raises(CommandFailed):
            driver.ask(Move(2, deed="bad"), key="ada", id="1")
        assert len(driver.dead_letters()) == (policy is DEAD_LETTER)
        bad.is_broken = False
        assert driver.ask(Move(2, deed="bad"), key="ada", id="1").version == 2
        assert gapless(driver) == {"ada": 2}


def test_a_letter_that_is_replayed_is_no_duplicate() -> None:
    bad = Bad()
    with TestDriver(build(deeds={"bad": bad}, on_error=DEAD_LETTER)) as driver:
        with pytest.raises(CommandFailed):
            driver.ask(Move(2, deed="bad"), key="ada", id="1")
        bad.is_broken = False
        driver.send(Move(2, deed="bad"), key="ada", headers=[("kes-id", b"1")])
        assert driver.ask(Move(2, deed="bad"), key="ada", id="1").version == 1
        assert gapless(driver) == {"ada": 1}


def test_a_parked_command_takes_effect_when_its_key_goes_on() -> None:
    bad = Bad()
    with TestDriver(build(deeds={"bad": bad}, on_error=PARK)) as driver:
        for _ in range(2):  # asking again is harmless: it queues behind the first
            with pytest.raises(Parked):
                driver.ask(Move(2, deed="bad"), key="ada", id="1")
        with pytest.raises(Parked):
            driver.ask(Move(-1), key="ada", id="2")
        assert driver.ask(Move(1), key="bob", id="3").version == 1
        bad.is_broken = False
        driver.retry_parked("ada")
        assert driver.ask(Move(2, deed="bad"), key="ada", id="1").version == 1
        assert driver.ask(Move(-1), key="ada", id="2").version == 2
        assert gapless(driver) == {"ada": 2, "bob": 1}
        driver.check()


def test_a_parked_command_that_is_dropped_has_failed() -> None:
    bad = Bad()
    with TestDriver(build(deeds={"bad": bad}, on_error=PARK)) as driver:
        with pytest.raises(Parked):
            driver.ask(Move(2, deed="bad"), key="ada", id="1")
        driver.skip_head("ada")
        bad.is_broken = False
        assert driver.ask(Move(2, deed="bad"), key="ada", id="1").version == 1


def test_a_failed_command_in_front_of_a_parked_one_is_told_apart() -> None:
    """The queue of the key has it, or it has failed."""
    with TestDriver(build(partitions=1, deeds={"bad": Bad()}, on_error=PARK)) as driver:
        with pytest.raises(Parked):
            driver.ask(Move(2, deed="bad"), key="ada", id="1")
        driver.skip_head("ada")
        with pytest.raises(Parked):
            driver.ask(Move(2, deed="bad"), key="ada", id="2")
        assert driver._run(answered(queries_of(driver), question("1", at=0))).kind == "failed"
        assert driver._run(answered(queries_of(driver), question("2", at=1))).kind == "parked"


def _mutate(purse: Purse, command: Move) -> list[Moved]:
    purse.cents = 1_000_000
    return [Moved(command.cents)]


def test_what_decide_changes_in_its_state_is_lost() -> None:
    with TestDriver(build(deeds={"mutate": _mutate})) as driver:
        driver.ask(Move(1, deed="mutate"), key="ada", id="1")
        driver.ask(Move(1, deed="mutate"), key="ada", id="2")
        assert balance(driver, "ada") == Versioned(2, Purse(2))


def _exit(purse: Purse, command: Move) -> Any:
    raise SystemExit(3)


def test_an_exit_ends_the_source_as_in_any_handler() -> None:
    source = build(deeds={"exit": _exit}, on_error=SKIP)
    with pytest.raises(SystemExit), TestDriver(source) as driver:
        driver.ask(Move(1, deed="exit"), key="ada", id="1")


BAD_ANSWERS: dict[str, Callable[[Purse, Move], Any]] = {
    "none": lambda purse, command: None,
    "generator": lambda purse, command: (Moved(1) for _ in range(3)),
    "many": lambda purse, command: [Moved(1)] * 10_000,
    "no event": lambda purse, command: [object()],
    "too large": lambda purse, command: [Moved(1, "x" * 2_000_000)],
}


@pytest.mark.parametrize("deed", BAD_ANSWERS)
def test_what_is_no_answer_is_a_failure(deed: str) -> None:
    with TestDriver(build(deeds=BAD_ANSWERS, on_error=DEAD_LETTER)) as driver:
        with pytest.raises(CommandFailed):
            driver.ask(Move(1, deed=deed), key="ada", id="1")
        assert (len(driver.dead_letters()), driver.outputs(OUT)) == (1, [])
        assert driver.ask(Move(1), key="ada", id="1").version == 1


def test_events_that_are_too_large_for_a_reply_are_in_the_output() -> None:
    deeds = {"large": lambda purse, command: [Moved(1, "x" * 100_000)] * 2}
    with TestDriver(build(deeds=deeds)) as driver:
        for _ in range(2):
            done = driver.ask(Move(1, deed="large"), key="ada", id="1")
            assert (done.version, done.count, done.events) == (2, 2, None)
        assert gapless(driver) == {"ada": 2}


@pytest.mark.parametrize(
    ("key", "headers"),
    [
        ("ada", []),
        ("ada", [("kes-id", b"")]),
        ("ada", [("kes-id", b"x" * 101)]),
        ("ada", [("kes-id", b"1"), ("kes-expected", b"-1")]),
        ("ada", [("kes-id", b"1"), ("kes-expected", b"one")]),
        (None, [("kes-id", b"1")]),
        (b"\xff\xff", [("kes-id", b"1")]),
    ],
)
def test_a_record_that_is_no_command_meets_the_error_policy(key: Any, headers: Headers) -> None:
    with TestDriver(build(on_error=DEAD_LETTER)) as driver:
        driver.send(Move(1), key=key, partition=0, headers=headers)
        assert (len(driver.dead_letters()), driver.outputs(OUT)) == (1, [])
        driver.check()


def test_without_a_policy_a_failure_stops_the_source() -> None:
    with TestDriver(build()) as driver, pytest.raises(EventFailure, match="the command has no id"):
        driver.send(Move(1), key="ada")


# -- other handlers, other tables --------------------------------------------------------------------------------------


def test_other_handlers_apply_events_among_those_of_commands() -> None:
    with TestDriver(build(partitions=1, on_error=SKIP)) as driver:
        driver.ask(Move(5), key="ada", id="1")
        driver.send(Added("ada", 2, "thrice"), key="ada")
        assert driver.ask(Move(-1), key="ada", id="2", expected_version=4).version == 5
        assert (gapless(driver), balance(driver, "ada")) == ({"ada": 5}, Versioned(5, Purse(10)))
        driver.check()


def test_apply_is_bounded_and_takes_events() -> None:
    purses = bare().aggregate(Purse(), events=OUT)
    for wrong in ([Moved(1)] * 129, None, Moved(1)):
        with pytest.raises(RecordError, match="apply takes a list of 128 events"):
            purses.apply(None, "ada", wrong)  # type: ignore[arg-type]


def plain() -> EventSource[Any]:
    """Make the release before: a table of the same states, without commands."""
    config = config_of(group_id="purses", topic="commands", num_partitions=1)
    source: EventSource[Table[str, Purse]] = EventSource(config, Table.factory(key=str, value=Purse))

    @source.on
    def on_added(ctx: EventContext[Table[str, Purse]], event: Added) -> None:
        ctx.store.put(event.name, Purse(event.amount))

    return source


def test_over_a_plain_table_its_entries_have_version_0() -> None:
    """Events are numbered from there on."""
    releases: list[Callable[[], EventSource[Any]]] = [plain]
    with TestDriver(lambda: releases[-1]()) as driver:
        driver.send(Added("ada", 7), key="ada")
        driver.crash()
        releases.append(lambda: build(partitions=1))
        driver.restart()
        assert balance(driver, "ada") == Versioned(0, Purse(7))
        assert driver.ask(Move(-3), key="ada", id="1", expected_version=0).version == 1
        assert (balance(driver, "ada"), versions(driver)) == (Versioned(1, Purse(4)), {"ada": [1]})


# -- the owner's answer ------------------------------------------------------------------------------------------------


def question(id: str = "1", key: bytes = b"ada", at: int | None = None, **more: Any) -> CommandQuestion:
    place = None if at is None else ("commands", 0, at)
    return CommandQuestion(group="purses", partition=0, id=id, key=key, at=place, **more)


def queries_of(driver: TestDriver[Any], member: int = 0) -> Any:
    return driver._world.members[member].source._run.queries()


def test_a_question_is_held_until_the_reply_is_committed() -> None:
    with TestDriver(build(partitions=1)) as driver:

        async def ask() -> tuple[CommandAnswer, int]:
            asking = asyncio.create_task(answered(queries_of(driver), question(hold_seconds=4.0)))
            await asyncio.sleep(1.0)
            assert not asking.done()
            driver.send(Move(5), key="ada", headers=[("kes-id", b"1")], wait=False)
            answer = await asking
            return answer, len(driver.outputs(OUT))

        answer, outputs = driver._run(ask())
        assert (answer.kind, outputs) == ("reply", 1), "its event is committed by then"
        assert answer.positions == (("commands", 0, 1),)


def test_an_answer_waits_for_a_commit_that_is_lost_on_its_way() -> None:
    with TestDriver(build(partitions=1)) as driver:
        driver.lose_reply("commit")
        driver.send(Move(5), key="ada", headers=[("kes-id", b"1")], wait=False)

        async def ask() -> tuple[CommandAnswer, int]:
            answer = await answered(queries_of(driver), question(hold_seconds=60, timeout_seconds=60))
            return answer, len(driver.outputs(OUT))

        while (found := driver._run(ask()))[0].kind == "waits":
            pass
        assert (found[0].kind, found[1]) == ("reply", 1)


def test_a_question_without_an_answer_ends_in_time() -> None:
    with TestDriver(build(partitions=1)) as driver:
        began = driver.now
        assert driver._run(answered(queries_of(driver), question(hold_seconds=2.0))).kind == "waits"
        assert 2.0 <= driver.now - began < 3.0
        assert driver._run(answered(queries_of(driver), question(at=0, hold_seconds=0.5))).kind == "waits"
        assert driver._run(answered(queries_of(driver), question(hold_seconds=0))).kind == "waits"
        worker = queries_of(driver).engine.workers[0]
        assert not worker.timers.awaited._waiting, "nobody is left behind"


def test_where_the_partition_is_not_there_is_no_answer() -> None:
    with TestDriver(build(partitions=2), members=2) as driver:
        owner = driver.owner(0)
        assert owner is not None
        with pytest.raises(NotOwned):
            driver._run(answered(queries_of(driver, 1 - owner), question()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"group": "other"},
        {"partition": 2},
        {"partition": -1},
        {"id": ""},
        {"id": "x" * 101},
        {"hold_seconds": -1.0},
        {"timeout_seconds": 0.0},
        {"timeout_seconds": float("nan")},
    ],
)
def test_questions_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        checked_question(msgspec.structs.replace(question(), **wrong), "purses", 2)


def test_without_a_member_nothing_is_known() -> None:
    with TestDriver(build()) as driver:
        driver.crash()
        with pytest.raises(NotKnown):
            driver.ask(Move(1), key="ada", id="1")
        driver.restart()
        assert driver.ask(Move(1), key="ada", id="1").version == 1
        assert gapless(driver) == {"ada": 1}


# -- declarations ------------------------------------------------------------------------------------------------------


def bare(**settings: Any) -> EventSource[Any]:
    config = EventSourceConfig(group_id="g", topic="t", num_partitions=1, **settings)
    return EventSource(config, Aggregate.factory(key=str, state=Purse))


async def _async(purse: Purse, command: Move) -> list[Moved]:
    return []


def _yields(purse: Purse, command: Move) -> Any:
    yield Moved(1)


def _no_class(purse, command):  # type: ignore[no-untyped-def]
    return []


def _one(purse: Purse) -> list[Moved]:
    return []


@pytest.mark.parametrize("function", [_async, _yields, _no_class, _one, None, Purse])
def test_functions_that_cannot_decide_are_refused(function: Any) -> None:
    purses = bare().aggregate(Purse(), events=OUT)
    with pytest.raises(RegistrationError):
        purses.decide(function)
    with pytest.raises(RegistrationError):
        purses.evolve(function)


@pytest.mark.parametrize(
    "arguments",
    [
        {"initial": Purse},
        {"events": ""},
        {"events": None},
        {"remember": timedelta(seconds=59)},
        {"remember": timedelta(days=400)},
        {"remember": 60},
    ],
)
def test_aggregates_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    given = {"initial": Purse(), "events": OUT} | arguments
    with pytest.raises((ConfigError, RegistrationError)):
        bare().aggregate(given.pop("initial"), **given)


def test_a_source_has_one_aggregate_before_its_start() -> None:
    source = bare()
    purses = source.aggregate(Purse(), events=OUT)

    def decide(purse: Purse, command: Move) -> list[Moved]:
        return []

    assert purses.decide(decide) is decide
    with pytest.raises(RegistrationError, match="one class, one function"):
        purses.decide(decide)
    with pytest.raises(RegistrationError, match="has an aggregate already"):
        source.aggregate(Purse(), events=OUT)
    source._declared.router.freeze()
    with pytest.raises(RegistrationError):
        purses.evolve(lambda purse, event: purse)
    late = bare()
    late._declared.router.freeze()
    with pytest.raises(RegistrationError):
        late.aggregate(Purse(), events=OUT)


@pytest.mark.parametrize("key", [int, None, tuple])
def test_keys_are_those_of_records(key: Any) -> None:
    with pytest.raises(ConfigError, match="keys of an Aggregate"):
        Aggregate.factory(key=key, state=Purse)


def test_a_driver_and_a_client_want_an_aggregate() -> None:
    source = plain()
    with TestDriver(source) as driver, pytest.raises(ConfigError, match="no aggregate"):
        driver.ask(Move(1), key="ada", id="1")
    with pytest.raises(ConfigError, match="secret_file"):
        CommandClient.of(build(bootstrap_servers="localhost:1"))
