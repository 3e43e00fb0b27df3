"""Each fault of ``TestDriver`` really happens, and what is committed is exactly-once all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from typing import Any, get_args

import pytest

from streams import Change, EventContext, EventSource, TopicPartition
from streams.errors import ConfigError, MembershipLost, NotOwned, StreamsError
from streams.metrics import MembershipChanged, TransactionSettled
from streams.runtime.read_proofs import ReadProofs
from streams.testing import POINTS, Point, TestDriver
from streams.testing.simulation.faults import Strike
from tests.unit.driver_kit import config, totals
from tests.vocabulary import TOTALS, Totals

from .driver_kit import OUT, Added, Slow, Total, build

pytestmark = pytest.mark.usefixtures("quiet")

Driver = TestDriver[Totals]


@pytest.fixture
def measured() -> list[Any]:
    return []


@pytest.fixture
def driver(measured: list[Any]) -> Iterator[Driver]:
    with TestDriver(build(partitions=1, metrics_handler=measured.append)) as made:
        yield made


def written(driver: Driver, topic: str = OUT) -> int:
    """Records in a topic, those of aborted and open transactions included."""
    logs = [log for (name, _), log in driver._world.broker.logs.items() if name == topic]
    return sum(not entry.marker for log in logs for entry in log.entries)


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])
def test_a_metrics_handler_that_fails_is_only_logged(error: type[BaseException]) -> None:
    def fails(measurement: object) -> None:
        raise error

    with TestDriver(build(partitions=1, metrics_handler=fails)) as driver:
        for _ in range(2):
            driver.send(Added("a"))
        assert totals(driver) == [1, 2]


def its_task_cancelled() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize("place", ["made", "receive_change", "revoked", "task"])
def test_a_cancellation_of_somebody_elses_does_not_end_the_source_in_silence(place: str) -> None:
    """A group of tasks takes it for its own: the source ended as if it had been stopped."""

    class Store:
        def __init__(self, partition: TopicPartition) -> None:
            self.at("made")

        def at(self, now: str) -> None:
            if now == place:
                raise asyncio.CancelledError

        def receive_change(self, change: Change) -> None:
            self.at("receive_change")

        def revoked(self) -> None:
            self.at("revoked")

    def work(ctx: EventContext[Store], event: Added) -> None:
        ctx.record_change(Change(b"a", b"1"))
        if place == "task":
            its_task_cancelled()

    source = EventSource(config(1), Store)
    source.register_event_type(Added, work)
    said = r"a cancellation that is not its own|revoked\(\) failed: CancelledError"
    with pytest.raises((RuntimeError, StreamsError), match=said), TestDriver(source) as driver:  # noqa: PT012
        driver.send(Added("ann"))
        driver.crash(0)
        driver.restart(0)
        driver.leave(0)


def test_a_cancellation_of_a_lifespan_is_no_orderly_end() -> None:
    async def consume() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="a cancellation that is not its own"):
        EventSource(config(1), TOTALS)._run.run(consume)


# -- crashes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("point", "seen", "in_the_log"), [("commit.before", [1], 3), ("commit.after", [1, 2], 2)])
def test_a_crash_around_the_commit_shows_all_or_nothing(
    driver: Driver, point: Point, seen: list[int], in_the_log: int
) -> None:
    driver.send(Added("ann"))
    trap = driver.at(point, driver.crash)
    driver.send(Added("ann"))
    assert (trap.sprung, driver.members, written(driver)) == (1, [], 2)
    assert (totals(driver), driver.committed_offsets()) == (seen, {0: len(seen)})
    driver.restart()
    assert (totals(driver), written(driver)) == ([1, 2], in_the_log)
    driver.check()


JOINS = ("release.", "handed_over.", "took.", "revoke.")
"""Points that are passed when somebody joins or leaves."""


@pytest.mark.parametrize("point", [point for point in POINTS if not point.startswith("purge.")])  # of a loop
def test_a_crash_at_any_point_changes_nothing(point: Point) -> None:
    strategy = "cooperative-sticky" if point.startswith("revoke") else "incremental"
    with TestDriver(build(partitions=4, strategy=strategy), members=2) as made:
        for number in range(6):
            made.send(Added(f"k{number}"), key=f"k{number}")
        trap = made.at(point, made.crash)
        if point.startswith("abort."):
            made.refuse("flush", 0)
            made.refuse("flush", 1)
        if point == "lost.before":
            made.evict(0)
        for number in range(6):
            made.send(Added(f"k{number}"), key=f"k{number}", wait=False)
        if point.startswith(JOINS) or not trap.is_armed:
            made.join()
        made.advance(1.0)
        made.settle()
        made.join()
        for number in [0, 1]:
            if number not in made.members:
                made.restart(number)
        made.settle()
        assert trap.sprung == 1
        assert sorted((total.name, total.amount) for total in made.outputs(OUT, Total)) == [
            (f"k{number}", count) for number in range(6) for count in (1, 2)
        ]
        made.check()


# -- the broker's side -------------------------------------------------------------------------------------------------


def refused(call: Any) -> Callable[[Driver], Any]:
    """The broker refuses the call; the trap is sprung when the transaction is aborted."""

    def act(driver: Driver) -> Any:
        driver.refuse(call)
        return driver.at("abort.after", lambda member: None)

    return act


ONCE, SENT_AGAIN, ONCE_OR_TWICE = {1}, {2}, {1, 2}


@pytest.mark.parametrize(
    ("act", "records", "seconds"),
    [
        pytest.param(lambda driver: driver.abort(), SENT_AGAIN, 0.0, id="aborted"),
        pytest.param(lambda driver: driver.at("flush.after", driver.abort), SENT_AGAIN, 0.0, id="aborted while open"),
        pytest.param(lambda driver: driver.at("flush.after", driver.fence), SENT_AGAIN, 0.0, id="fenced"),
        pytest.param(refused("flush"), ONCE, 0.0, id="flush refused"),
        pytest.param(refused("send_offsets"), SENT_AGAIN, 0.0, id="send_offsets refused"),
        pytest.param(lambda driver: driver.refuse("commit"), SENT_AGAIN, 0.0, id="commit refused"),
        pytest.param(lambda driver: driver.lose_reply("flush"), ONCE_OR_TWICE, 0.0, id="reply to flush lost"),
        pytest.param(lambda driver: driver.lose_reply("send_offsets"), ONCE_OR_TWICE, 0.0, id="reply to offsets lost"),
        pytest.param(lambda driver: driver.lose_reply("commit"), ONCE, 0.0, id="reply to commit lost"),
        pytest.param(lambda driver: driver.lose_request("commit"), ONCE, 0.0, id="commit lost"),
        pytest.param(lambda driver: driver.delay("commit"), ONCE_OR_TWICE, 0.0, id="commit late"),
        pytest.param(lambda driver: driver.outage(20.0), ONCE_OR_TWICE, 20.0, id="outage"),
    ],
)
def test_what_goes_wrong_at_the_broker_has_its_effects_once(
    driver: Driver, measured: list[Any], act: Callable[[Driver], Any], records: set[int], seconds: float
) -> None:
    before = driver.now
    trap = act(driver)
    driver.send(Added("ann"))
    assert driver.now - before >= seconds
    assert trap is None or trap.sprung == 1
    assert written(driver) in records
    driver.advance(60.0)  # what was late has no effect any more
    assert totals(driver) == [1]
    assert driver.members == [0]
    if records is SENT_AGAIN and trap is None:
        assert [it.attempts for it in measured if isinstance(it, TransactionSettled)] == [2]
    driver.check()


def test_the_time_of_a_commit_is_told_with_the_part_of_the_flush(driver: Driver, measured: list[Any]) -> None:
    for seconds in (3.0, 1.0):
        driver.at("flush.before", lambda member, seconds=seconds: driver.freeze(seconds=seconds))  # type: ignore[misc]
        driver.at("commit.before", lambda member: driver.freeze(seconds=0.5))
        driver.send(Added("ann"))
        settled = [it for it in measured if isinstance(it, TransactionSettled)][-1]
        assert seconds <= settled.flush_seconds <= settled.commit_seconds - 0.5 < seconds + 0.5


# -- the group's side --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgets", ["the group", "the coordinator"])
def test_a_member_that_is_not_known_any_more_comes_back(driver: Driver, measured: list[Any], forgets: str) -> None:
    for _ in range(3):
        driver.send(Added("ann"))
    if forgets == "the group":
        driver.evict()
    else:
        driver.forget_group()
        assert driver.committed_offsets() == {}
    driver.send(Added("ann"))
    assert (totals(driver), driver.committed_offsets()) == ([1, 2, 3, 4], {0: 4})
    assert any(it.lost for it in measured if isinstance(it, MembershipChanged))
    driver.check()


def test_a_frozen_member_is_overtaken_and_harmless_when_it_thaws() -> None:
    with TestDriver(build(partitions=2), members=2) as made:
        owner = made.owner(0)
        trap, before = made.at("commit.before", made.freeze, member=owner), made.now
        made.send(Added("ann"), partition=0)  # done by the other one, when the session is over
        assert trap.sprung == 1
        assert made.now - before > 5.0  # the session timeout is 6 s
        assert made.owner(0) not in (None, owner)
        assert totals(made) == [1]
        made.thaw(owner)
        made.settle()
        made.send(Added("ann"), partition=0)
        assert totals(made) == [1, 2]
        made.check()


@pytest.mark.parametrize("asked", ["frozen", "thawed"])
def test_a_look_at_a_member_that_was_overtaken_is_not_answered_from_old_state(asked: str) -> None:
    """Its loop works on, and it does not know yet: what it commits is refused, and so is what it sees."""
    with pytest.raises((NotOwned, MembershipLost)):
        look_at_a_member_that_was_overtaken(asked)


@pytest.mark.parametrize("asked", ["frozen", "thawed"])
@pytest.mark.parametrize("without", ["any proof", "the answer to the heartbeat"])
def test_without_its_proof_it_would_be(monkeypatch: pytest.MonkeyPatch, asked: str, without: str) -> None:
    async def proven(_: ReadProofs) -> bool:
        return True

    if without == "any proof":
        monkeypatch.setattr(ReadProofs, "answer", lambda _, worker, waiter, proof: waiter(None))
    else:
        monkeypatch.setattr(ReadProofs, "_is_proven", proven)
    assert look_at_a_member_that_was_overtaken(asked) == 1, "where the truth is 2"


def look_at_a_member_that_was_overtaken(asked: str) -> int:
    with TestDriver(build(partitions=2), members=2) as made:
        made.send(Added("ann"), partition=0)
        owner = made.owner(0)
        assert owner is not None
        source = made._world.members[owner].source
        made.freeze(owner)
        made.send(Added("ann"), partition=0)
        assert totals(made) == [1, 2], "the other one's doing"

        async def look() -> int:
            if asked == "thawed":
                made.thaw(owner)
            task = asyncio.ensure_future(source.interject(0, lambda ctx: ctx.store.get("ann")))
            await asyncio.wait([task], timeout=1.0)
            made.thaw(owner)
            return await asyncio.wait_for(task, 100.0)

        seen: int = made._run(look())
        return seen


def test_a_member_that_is_frozen_for_a_moment_goes_on(driver: Driver) -> None:
    driver.freeze(seconds=2.0)
    driver.send(Added("ann"))
    assert driver.now > 2.0
    assert totals(driver) == [1]
    driver.freeze()
    driver.send(Added("ann"))  # nothing can happen, so it does not wait
    assert totals(driver) == [1]
    driver.thaw()
    driver.settle()
    assert totals(driver) == [1, 2]


def test_restores_read_a_compacted_changelog(driver: Driver) -> None:
    for _ in range(20):
        driver.send(Added("ann"))
    driver.compact()
    batches = driver.at("tail.received", lambda member: None, times=100)
    driver.crash()
    driver.restart()
    assert batches.sprung >= 1
    driver.send(Added("ann"))
    assert totals(driver)[-1] == 21


# -- traps -------------------------------------------------------------------------------------------------------------


def test_traps_wait_for_their_member_partition_and_turn() -> None:
    seen: list[int] = []
    with TestDriver(build(partitions=4), members=2) as made:
        mine = made.owner(1)
        traps = [
            made.at("handler.before", seen.append, partition=1, skip=1, times=2),
            made.at("handler.before", lambda member: seen.append(100 + member), member=1 - (mine or 0), partition=1),
        ]
        for _ in range(5):
            made.send(Added("ann"), partition=1)
            made.send(Added("bob"), partition=2)
        assert seen == [mine, mine]
        assert [trap.sprung for trap in traps] == [2, 0]
        assert repr(traps[1]).endswith("armed)")
        with pytest.raises(ConfigError, match="skip is -1"):
            made.at("handler.before", seen.append, skip=-1)


def test_what_a_trap_raises_is_raised_by_the_call(driver: Driver) -> None:
    def wrong(member: int) -> None:
        raise LookupError("wrong trap")

    driver.at("flush.after", wrong)
    with pytest.raises(LookupError, match="wrong trap"):
        driver.send(Added("ann"))
    driver.settle()
    assert totals(driver) == [1]


def test_a_member_can_be_restarted_by_a_trap(driver: Driver) -> None:
    def bounce(member: int) -> None:
        driver.crash(member)
        driver.restart(member)

    trap = driver.at("flush.before", bounce)
    driver.send(Added("ann"))
    assert trap.sprung == 1
    assert totals(driver) == [1]


def test_traps_may_be_set_before_the_start() -> None:
    with TestDriver(build(partitions=1), start=False) as made:
        made.send(Added("ann"))
        assert made.members == []
        trap = made.at("init.after", made.crash)
        made.start()
        assert trap.sprung == 1
        made.restart()
        assert totals(made) == [1]


# -- the same again ----------------------------------------------------------------------------------------------------


def _eventful(driver: Driver) -> None:
    driver.at("commit.after", driver.crash, skip=2)
    for number in range(10):
        driver.send(Slow(f"k{number % 3}", 0.5), key=f"k{number % 3}", wait=False)
    driver.advance(3.0)
    driver.join()
    driver.settle()


def test_the_same_seed_gives_the_same_run_to_the_last_record() -> None:
    def run(seed: int) -> Any:
        with TestDriver(build(), members=2, seed=seed) as made:
            _eventful(made)
            logs = sorted(made._world.broker.logs.items())
            entries = [(*name, entry) for name, log in logs for entry in log.entries]
            return made.trace, [(t, p, e.key, e.value, e.headers, e.timestamp_ms, e.marker) for t, p, e in entries]

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_the_points_are_known() -> None:
    assert tuple(POINTS) == get_args(Point)


def test_a_source_keeps_its_parts_and_nothing_else() -> None:
    """A copy for a member has parts of its own (``EventSource._hold``); a new attribute has to be thought of there. One
    of ``Declarations`` has to be copied."""
    source = build()
    assert set(vars(source)) == {"_declared", "_run", "_requests", "routed_by"}
    assert set(vars(source._declared)) == {
        "_registry", "_store", "aggregate", "callbacks", "handlers", "inputs", "joins", "lifespans", "lookups",
        "metrics_handlers", "outputs", "router", "visits",
    }  # fmt: skip


def test_the_check_finds_what_is_broken(driver: Driver) -> None:
    """A safeguard of the safeguard: each kind of damage is told."""
    driver.send(Added("ann"))
    driver.send(Added("ann"))
    driver.check()
    damages: list[tuple[Callable[[], object], str]] = [
        (lambda: driver.store(0)._engine.clear(), "the store of"),  # type: ignore[attr-defined]
        (lambda: driver._world.broker.offsets.update({0: 1}), "the group's offset is 1"),
        (lambda: driver.send(Added("ann"), wait=False), "are not handled"),
    ]
    for damage, text in damages:
        damage()
        with pytest.raises(AssertionError, match=text):
            driver.check()


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_partitions_that_restart_together_are_taken_over_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator forgets the member for a moment: all its partitions restart, with one round of questions."""
    asked: list[list[int]] = []
    with TestDriver(build(partitions=8)) as driver:
        for partition in range(8):
            driver.send(Added("ann"), partition=partition)
        engine = driver._world.members[0].engine
        assert engine is not None
        stable_offsets = engine.takeover_client.stable_offsets

        def counted(partitions: Collection[int], deadline: float) -> dict[int, int | None]:
            asked.append(sorted(partitions))
            return stable_offsets(partitions, deadline)

        monkeypatch.setattr(engine.takeover_client, "stable_offsets", counted)
        driver._strike("send_offsets", Strike.FORGOTTEN, None)
        for partition in range(8):
            driver.send(Added("ann"), partition=partition, wait=False)
        driver.settle()
        assert asked == [list(range(8))]
        assert sorted(totals(driver)) == [1] * 8 + [2] * 8
        driver.check()
