"""Events that are handled once: at their turn, with their unit, for a time, in every kind of handler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streams import DEAD_LETTER, SKIP
from streams.disk import SQLite
from streams.errors import EventFailure
from streams.metrics import EventDuplicate, IdMissing, IdsForgotten
from streams.records import Record
from streams.settings import Once, StateConfig, header
from tests.unit.once_kit import WEEK, ids, numbers, once, sent
from tests.unit.parking_kit import AHEAD, add, redeploy, send

pytestmark = pytest.mark.usefixtures("quiet")
WAYS = ("plain", "async", "blocking", "batch", *AHEAD)
ways = pytest.mark.parametrize("way", WAYS)
# -- D2, D3: found at the turn, and passed -----------------------------------------------------------------------------


@ways
def test_copies_have_no_effect_wherever_they_come(way: str) -> None:
    """In one slice, in later transactions, behind a kill, a move, and an aborted transaction."""
    bank = once(way)
    with bank.driver() as driver:
        add(driver, 1, 1, 2, 1, 3, 3)
        assert (numbers(driver), sent(driver)) == ((1, 2, 3), [1, 2, 3])
        add(driver, 2)
        assert driver.committed_offsets() == {0: 7}, "the position moves over duplicates"
        driver.abort()
        add(driver, 4, 4, 1)
        driver.crash()
        driver.restart()
        add(driver, 1, 4, 5)
        driver.join()
        driver.leave(driver.owner(0))
        add(driver, 5, 6, 6)
        assert (numbers(driver), sent(driver)) == ((1, 2, 3, 4, 5, 6), [1, 2, 3, 4, 5, 6])
        assert "1" not in driver.seen("Add")
        assert [number for number in range(8) if number in driver.seen("Add")] == [1, 2, 3, 4, 5, 6]
        assert len(ids(driver)) == 6
        driver.check()


@ways
def test_duplicates_are_counted_by_type(way: str) -> None:
    found: list[EventDuplicate] = []
    take = lambda one: found.append(one) if isinstance(one, EventDuplicate) else None  # noqa: E731
    bank = once(way, metrics_handler=take)
    with bank.driver() as driver:
        add(driver, 1, 1, 2, 2, 2)
        assert {one.type for one in found} == {"Add"}
        assert sum(one.events for one in found) == 3
        (partition,) = driver.statistics().partitions
        assert (partition.once_ids, partition.once_duplicates, partition.once_missing) == (2, 3, 0)


def test_a_batch_gets_no_duplicates_and_may_begin_and_end_with_some() -> None:
    bank = once("batch")
    with bank.driver() as driver:
        add(driver, 1)
        add(driver, 1, 1, 2, 1, 3, 2)
        add(driver, 1, 3)
        assert bank.lists == [[1], [2, 3]]
        assert driver.committed_offsets() == {0: 9}
        driver.check()


@pytest.mark.parametrize("way", ["jobs", "batcher", "concurrent"])
def test_work_ahead_of_a_known_duplicate_does_not_begin(way: str) -> None:
    bank = once(way)
    with bank.driver() as driver:
        add(driver, 1, 2)
        bank.calls.clear()
        add(driver, 1, 2, 1, 3)
        assert bank.calls == [3]
        driver.check()


@pytest.mark.parametrize("way", ["jobs", "batcher", "concurrent"])
def test_copies_that_run_ahead_side_by_side_are_found_at_their_turn(way: str) -> None:
    bank = once(way)
    with bank.driver() as driver:
        bank.seconds = {1: 5.0, 2: 1.0}
        for key in ("a", "b", "c"):  # of one id, and of several keys: none waits for another one
            send(driver, 1, 2, key=key)
        driver.advance(10)
        assert sorted(numbers(driver, "a") + numbers(driver, "b") + numbers(driver, "c")) == [1, 2]
        assert sorted(sent(driver)) == [1, 2]
        driver.check()


# -- D1: handled means seen --------------------------------------------------------------------------------------------


@ways
def test_an_event_that_was_skipped_is_not_seen(way: str) -> None:
    bank = once(way, SKIP)
    with bank.driver() as driver:
        bank.broken = {1}
        add(driver, 1, 2)
        assert (numbers(driver), len(ids(driver))) == ((2,), 1)
        bank.broken = set()
        add(driver, 1, 1)
        assert numbers(driver) == (2, 1)
        driver.check()


@ways
def test_a_letter_that_is_sent_again_is_no_duplicate(way: str) -> None:
    bank = once(way, DEAD_LETTER)
    with bank.driver() as driver:
        bank.broken = {1}
        add(driver, 1, 2)
        (letter,) = driver.dead_letters()
        assert 1 not in driver.seen("Add")
        bank.broken = set()
        headers = [(name, value) for name, value in letter.headers or () if not name.startswith("__kes_")]
        driver.send_record(Record("adds", letter.value, letter.key, headers, 0))
        add(driver, 1)
        assert numbers(driver) == (2, 1)
        driver.check()


@ways
def test_a_copy_of_a_parked_event_waits_behind_it_and_is_found_at_its_turn(way: str) -> None:
    bank = once(way)
    with bank.driver() as driver:
        bank.broken = {1}
        add(driver, 1, 1, 2)
        add(driver, 10, key="b")
        (parked,) = driver.parked()
        assert len(parked.events) == 3
        assert 1 not in driver.seen("Add")
        bank.broken = set()
        redeploy(driver)
        driver.advance(40)
        assert (numbers(driver), sent(driver)) == ((1, 2), [10, 1, 2])
        assert not driver.parked()
        driver.check()


@ways
def test_a_copy_under_another_key_passes_the_parked_event_which_is_the_duplicate_then(way: str) -> None:
    bank = once(way)
    with bank.driver() as driver:
        bank.broken = {1}
        add(driver, 1, 3)
        bank.broken = set()
        add(driver, 1, key="b")
        driver.retry_parked("a")
        driver.advance(5)
        assert (numbers(driver, "b"), numbers(driver, "a")) == ((1,), (3,))
        assert not driver.parked()
        driver.check()


@ways
def test_a_further_attempt_is_no_duplicate_of_the_first(way: str) -> None:
    from streams import Retry

    bank = once(way, Retry(attempts=3, backoff_seconds=1, jitter=0))
    with bank.driver() as driver:
        bank.broken = {1}
        send(driver, 1)
        driver.advance(0.5)
        bank.broken = set()
        driver.advance(5)
        add(driver, 1)
        assert numbers(driver) == (1,)
        driver.check()


def test_events_of_timers_are_not_filtered() -> None:
    bank = once()
    with bank.driver() as driver:
        add(driver, 100, 100)  # sets a timer, once
        driver.advance(10)
        assert numbers(driver) == (100, 101)
        driver.check()


# -- D4: the window ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [None, SQLite()])
def test_ids_go_when_their_time_is_over_and_not_before(tmp_path: Path, engine: Any) -> None:
    bank = once(within=1000, **({} if engine is None else {"state": StateConfig(folder="s", checkpoint_seconds=1.0)}))
    bank.engine = engine
    assert bank.once is not None
    bank.once = Once("number", within=1000, engine=engine)
    with bank.driver(state_folder=str(tmp_path)) as driver:
        add(driver, 1, *range(101, 300))
        driver.advance(990)
        add(driver, 1, 500)
        assert numbers(driver).count(1) == 1
        driver.advance(400)  # in memory a sixty-fourth would be enough, on disk a quarter
        for more in range(5):
            add(driver, 501 + more)
            driver.advance(1)
        assert 1 not in driver.seen("Add")
        assert 500 in driver.seen("Add")
        assert len(ids(driver)) == 6, "tombstones"
        add(driver, 1)
        assert numbers(driver).count(1) == 2
        driver.check()


def test_a_backlog_is_deduplicated_by_the_time_of_its_records() -> None:
    """The source stood still for longer than ids are remembered: copies in what has come meanwhile are found."""
    bank = once(within=3600)
    with bank.driver() as driver:
        add(driver, 1)
        (first,) = driver._world.broker.log("adds", 0).committed(0, 1)
        driver.crash()
        driver.advance(10 * 3600)
        for number in (2, 3, 1, 4):
            data = b'{"number":%d,"key":"a"}' % number
            record = Record("adds", data, b"a", [("__grt__", b"Add")], 0, timestamp_ms=first.timestamp_ms + 60_000)
            driver.send_record(record, wait=False)
        driver.restart()
        driver.settle()
        assert numbers(driver) == (1, 2, 3, 4)
        driver.check()


def test_ids_are_remembered_by_their_own_time_when_within_changes() -> None:
    bank = once(within=1000)
    with bank.driver() as driver:
        add(driver, 1)
        bank.once = Once("number", within=100)
        driver.leave()
        driver.restart()
        driver.advance(500)
        add(driver, 2, 1)
        assert numbers(driver) == (1, 2)
        driver.check()


# -- D6: ids -----------------------------------------------------------------------------------------------------------

BAD: dict[str, Any] = {
    "a list": lambda record, event: [event.number],
    "a float": lambda record, event: 1.5,
    "a bool": lambda record, event: True,
    "empty": lambda record, event: "",
    "no bytes": lambda record, event: b"",
    "an error": lambda record, event: 1 // 0,
}


@pytest.mark.parametrize("name", BAD)
@ways
def test_what_is_no_id_meets_the_policy_of_the_event(way: str, name: str) -> None:
    bank = once(way, DEAD_LETTER)
    bank.once = Once(lambda record, event: BAD[name](record, event) if event.number < 9 else event.number, within=9)
    with bank.driver() as driver:
        add(driver, 9, 1, 10, 10)
        assert numbers(driver) == (9, 10)
        (letter,) = driver.dead_letters()
        error = b" ".join(value or b"" for _, value in letter.headers or ())
        assert (b"ZeroDivision" if name == "an error" else b"the id is") in error
        driver.check()


@ways
def test_ids_of_all_kinds_and_none(way: str) -> None:
    given: list[Any] = [0, None, "0", b"0", "ab", b"ab", "x" * 10_000, -5, 10**5000, None]
    found: list[IdMissing] = []
    take = lambda one: found.append(one) if isinstance(one, IdMissing) else None  # noqa: E731
    bank = once(way, metrics_handler=take)
    bank.once = Once(lambda record, event: given[event.number % 10], within=9)
    with bank.driver() as driver:
        add(driver, *range(20, 30))
        add(driver, *range(30, 40))
        # A text and its bytes are one id; a number is another one than its digits. Without an id all are handled.
        assert numbers(driver) == (20, 21, 22, 24, 26, 27, 28, 29, 31, 39)
        assert (sum(one.events for one in found), driver.statistics().partitions[0].once_missing) == (4, 4)
        driver.check()


def test_the_id_of_a_header_and_a_shared_scope() -> None:
    bank = once()
    bank.once = Once(header("kes-id"), within=9, scope="all")
    with bank.driver() as driver:
        for number, id_ in enumerate([b"x", b"x", None, b"y", None]):
            headers = [("__grt__", b"Add"), ("kes-id", id_)]
            driver.send_record(Record("adds", b'{"number":%d,"key":"a"}' % number, b"a", headers, 0))
        add(driver, 7)
        assert numbers(driver) == (0, 2, 3, 4, 7)
        assert driver.seen("all").kept("x") == b""
        assert driver.seen("Add").kept("x") is None
        driver.check()


# -- D7: bounds --------------------------------------------------------------------------------------------------------


@ways
def test_at_the_bound_the_source_stops_by_name(way: str) -> None:
    bank = once(way)
    bank.once = Once("number", within=WEEK, max_ids=3)
    with bank.driver() as driver:
        add(driver, 1, 2, 3, 2)
        with pytest.raises(EventFailure, match=r"adds\[0\]@4: there is no room for its id.* Once.max_ids \(3\) allows"):
            add(driver, 4)


def test_at_the_bound_ids_whose_time_is_over_make_room() -> None:
    bank = once()
    bank.once = Once("number", within=100, max_ids=3)
    with bank.driver() as driver:
        add(driver, 1, 2, 3)
        driver.advance(200)
        add(driver, 4, 5)
        assert numbers(driver) == (1, 2, 3, 4, 5)
        driver.check()


@ways
def test_the_oldest_ids_may_go_early(way: str) -> None:
    found: list[IdsForgotten] = []
    take = lambda one: found.append(one) if isinstance(one, IdsForgotten) else None  # noqa: E731
    bank = once(way, metrics_handler=take)
    bank.once = Once("number", within=640, max_ids=3, when_full="forget")
    with bank.driver() as driver:
        for number in range(6):
            add(driver, number)
            driver.advance(20)
        add(driver, 5, 4, 0)
        assert numbers(driver) == (0, 1, 2, 3, 4, 5, 0)
        assert len(ids(driver)) == 3
        driver.advance(1)
        add(driver, 0)
        assert sum(one.ids for one in found) == driver.statistics().partitions[0].once_forgotten == 4
        driver.check()
