"""Commands that cannot be: bad records, answers, questions, declarations."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER
from streams.errors import (
    CommandFailed,
    ConfigError,
    EventFailure,
    RegistrationError,
    Stopped,
)
from streams.queries.commands import CommandClient
from streams.records import Headers
from streams.runtime.queries.commands import checked_question
from streams.settings.groups import QueryConfig
from streams.stores import Aggregate
from streams.testing import TestDriver
from tests.unit.commands_kit import OUT, Move, Moved, Purse, bare, build, plain, question
from tests.unit.private_kit import private

pytestmark = pytest.mark.usefixtures("quiet")


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


# -- declarations ------------------------------------------------------------------------------------------------------


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


async def test_a_client_is_entered_before_it_is_used(tmp_path: Path) -> None:
    secret = str(private(tmp_path / "secret", "the secret of this group\n"))
    client = CommandClient.of(build(bootstrap_servers="localhost:1", queries=QueryConfig(secret_file=secret)))
    with pytest.raises(Stopped, match="enter it, by async with"):
        await client.ask(Move(1), key="ada", id="1")
    with pytest.raises(ConfigError, match="has no aggregate"):
        CommandClient.of(bare(bootstrap_servers="localhost:1", queries=QueryConfig(secret_file=secret)))


def test_a_driver_and_a_client_want_an_aggregate() -> None:
    source = plain()
    with TestDriver(source) as driver, pytest.raises(ConfigError, match="no aggregate"):
        driver.ask(Move(1), key="ada", id="1")
    with pytest.raises(ConfigError, match="secret_file"):
        CommandClient.of(build(bootstrap_servers="localhost:1"))
