"""Commands in a whole source: one effect an id, answers that are kept, versions without gap, over what may happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from streams import DEAD_LETTER, PARK, SKIP, EventSource, Retry
from streams.errors import (
    CommandFailed,
    IdReused,
    NotKnown,
    NotOwned,
    Parked,
    RecordError,
    Rejected,
    VersionConflict,
)
from streams.model.commands import Versioned
from streams.records import Headers
from streams.runtime.queries.commands import CommandAnswer, answered
from streams.testing import TestDriver
from streams.testing.simulation.virtual_time import elapse
from tests.unit.commands_kit import OUT, Move, Moved, Purse, bare, build, gapless, plain, queries_of, question, versions
from tests.vocabulary import Added

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
    """What is older than ``remember`` is a new command, at the latest at the second call: the guide says so."""
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


def test_events_that_are_too_large_for_a_reply_are_in_the_output() -> None:
    deeds = {"large": lambda purse, command: [Moved(1, "x" * 100_000)] * 2}
    with TestDriver(build(deeds=deeds)) as driver:
        for _ in range(2):
            done = driver.ask(Move(1, deed="large"), key="ada", id="1")
            assert (done.version, done.count, done.events) == (2, 2, None)
        assert gapless(driver) == {"ada": 2}


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


def test_a_question_is_held_until_the_reply_is_committed() -> None:
    with TestDriver(build(partitions=1)) as driver:

        async def ask() -> tuple[CommandAnswer, int]:
            asking = asyncio.create_task(answered(queries_of(driver), question(hold_seconds=4.0)))
            await elapse(1.0)
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
        assert not worker.timers.awaited._waiting, "none is left behind"


def test_where_the_partition_is_not_there_is_no_answer() -> None:
    with TestDriver(build(partitions=2), members=2) as driver:
        owner = driver.owner(0)
        assert owner is not None
        with pytest.raises(NotOwned):
            driver._run(answered(queries_of(driver, 1 - owner), question()))


def test_without_a_member_nothing_is_known() -> None:
    with TestDriver(build()) as driver:
        driver.crash()
        with pytest.raises(NotKnown):
            driver.ask(Move(1), key="ada", id="1")
        driver.restart()
        assert driver.ask(Move(1), key="ada", id="1").version == 1
        assert gapless(driver) == {"ada": 1}
