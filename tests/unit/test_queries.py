"""``source.query``: one turn for all that wait, committed, read-only, with a proof that the partition is still ours."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from streams.errors import ConfigError, MembershipLost, NotCaughtUp, NotOwned, StoreError, WouldDeadlock
from streams.kafka.questions.takeover import WireTakeOver
from streams.records import Delivery, Record, TopicPartition
from streams.runtime.queries.local import unfit
from streams.runtime.queries.points import PointRead
from streams.runtime.queries.questions import Question
from streams.runtime.read_proofs import ReadProofs
from streams.stores import NamedTable, Stores
from streams.testing import TestDriver
from streams.testing.simulation.classic_group import State
from streams.testing.simulation.virtual_time import elapse
from tests.unit.driver_kit import Slow, build
from tests.unit.handlers_kit import driven, send
from tests.unit.test_interjections import beats
from tests.vocabulary import INTS, Added, Words, count, touch

pytestmark = pytest.mark.usefixtures("quiet")

ANN = TopicPartition("added", 0)


@pytest.fixture
def driver() -> Iterator[TestDriver[Any]]:
    with TestDriver(build(partitions=1)) as made:
        yield made


def total(store: Any) -> Any:
    return store.get("ann")


def query(driver: TestDriver[Any], read: Callable[[Any], Any], member: int = 0, partition: int = 0, **more: Any) -> Any:
    source = driver._world.members[member].source
    return driver._run(source.query(None, read, partition=partition, **more))


def test_an_answer_says_what_it_is_as_of(driver: TestDriver[Any]) -> None:
    for _ in range(3):
        driver.send(Added("ann"))
    answer = query(driver, total)
    assert (answer.value, answer.partition, answer.positions, answer.served_by) == (
        3, 0, {ANN: 3}, driver._world.members[0].source.config.instance_id,
    )  # fmt: skip
    assert abs(answer.as_of - driver.time()) < 1.0
    driver.check()


def test_it_is_answered_when_what_it_saw_is_committed(driver: TestDriver[Any]) -> None:
    answers: list[Any] = []
    source = driver._world.members[0].source

    async def ask() -> None:
        answers.append((await source.query(None, total, partition=0)).value)

    def asked(member: int) -> None:
        driver._world.loop.create_task(ask())

    driver.at("send_offsets.before", asked)
    seen = driver.at("commit.before", lambda member: answers.append("commit"))
    driver.send(Added("ann"))
    driver.advance(1.0)
    assert seen.sprung == 1
    assert answers == ["commit", 1]


def test_those_that_wait_share_a_turn_and_a_proof(driver: TestDriver[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One heartbeat is the lease of all that come within half a session; then another one is needed."""
    heartbeats: list[str] = []
    monkeypatch.setattr(WireTakeOver, "is_member", beats(heartbeats, True))
    driver.send(Added("ann"))
    source = driver._world.members[0].source
    turns: list[int] = []
    begun = source._run.engine.ad_hoc.interject  # type: ignore[union-attr]

    async def interject(*args: Any, **more: Any) -> Any:
        turns.append(1)
        return await begun(*args, **more)

    monkeypatch.setattr(source._run.engine.ad_hoc, "interject", interject)  # type: ignore[union-attr]

    async def many() -> list[Any]:
        return await asyncio.gather(*(source.query(None, total, partition=0) for _ in range(200)))

    assert [answer.value for answer in driver._run(many())] == [1] * 200
    assert len(turns) == 2, "128 in the first"
    assert len(heartbeats) <= 2, "the second turn came while the first one was being proven"
    heartbeats.clear()
    query(driver, total)
    assert heartbeats == [], "the lease holds"
    driver.advance(3.1)
    query(driver, total)
    assert len(heartbeats) == 1


@pytest.mark.parametrize("known", [True, False], ids=["lease", "no lease"])
def test_confirmed_and_without_a_lease_it_is_fenced(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WireTakeOver, "is_member", beats([], known))
    with TestDriver(build(partitions=1)) as driver:
        driver.send(Added("ann"))

        def end() -> int:
            return driver._world.broker.log(driver._world.config.changelog, 0).end

        before = end()
        assert query(driver, total).value == 1
        assert (end() == before) == known
        before = end()
        assert query(driver, total, confirm=True).value == 1
        assert end() > before, "an empty transaction"
        driver.settle()
        driver.check()


def test_no_lease_from_a_group_that_rebalances(driver: TestDriver[Any]) -> None:
    """A member that does not come to the rebalance is thrown out when that began long ago, heartbeats or not."""
    query(driver, total)
    looks = driver._world.members[0].source._run.engine.read_proofs  # type: ignore[union-attr]
    assert looks.has_lease()
    looks._lease = None
    driver._world.groups.group.state = State.PREPARING
    assert query(driver, total).value is None
    assert not looks.has_lease(), "it was proven by an empty transaction"


def test_a_static_member_has_no_lease(driver: TestDriver[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that joins under its name has its partitions at once, whatever the group has answered before."""
    heartbeats: list[str] = []
    monkeypatch.setattr(WireTakeOver, "is_member", beats(heartbeats, True))
    engine = driver._world.members[0].source._run.engine
    assert engine is not None
    engine.config = msgspec.structs.replace(
        engine.config, group=msgspec.structs.replace(engine.config.group, static_membership=True)
    )
    found: list[Any] = []
    for number in (1, 2):
        query(driver, total)
        point(driver, "ann", found)
        driver.advance(0.2)
        assert len(found) == number
        assert len(heartbeats) == 2 * number, "each after its read"


def test_at_least_waits_for_what_was_sent(driver: TestDriver[Any]) -> None:
    source = driver._world.members[0].source
    slow = Slow("ann", 2.0)

    async def asks() -> Any:
        return await source.query(None, total, partition=0, at_least={ANN: 1}, timeout_seconds=5.0)

    task = driver._world.loop.create_task(asks())
    driver.advance(0.5)
    assert not task.done()
    driver.send(slow, wait=False)
    driver.advance(1.0)
    assert not task.done()
    driver.settle()
    driver.advance(0.1)
    assert task.result().value == 1
    sent = Delivery(Record("added", b""), 0, 0)
    assert query(driver, total, at_least=sent).value == 1
    with pytest.raises(NotCaughtUp, match=r"added\[0\] at 1 of 5"):
        query(driver, total, at_least={ANN: 5}, timeout_seconds=0.5)
    assert query(driver, total, at_least={TopicPartition("added", 7): 99}).value == 1, "of another partition"


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda store: store.put("ann", 7), "writes to the store"),
        (lambda store: store.delete("ann"), "writes to the store"),
        (lambda store: store.items(), "returned an iterator"),
        (lambda store: {}.items(), "returned an iterator or a view"),
        (lambda store: store, "returned the store itself"),
        (lambda store: store.get, "returned the store itself"),
        (lambda store: elapse(0.0), "returned an awaitable"),
        (lambda store: (_ for _ in ()).throw(asyncio.CancelledError), "a cancellation that is not its own"),
    ],
    ids=["put", "delete", "iterator", "view", "store", "method", "awaitable", "cancelled"],
)
def test_a_read_that_does_more_is_refused_alone(driver: TestDriver[Any], read: Any, says: str) -> None:
    driver.send(Added("ann"))
    source = driver._world.members[0].source

    async def three() -> list[Any]:
        asked = (source.query(None, each, partition=0) for each in (total, read, total))
        return await asyncio.gather(*asked, return_exceptions=True)

    first, refused, last = driver._run(three())
    assert (first.value, last.value) == (1, 1), "of the same turn"
    assert isinstance(refused, RuntimeError if "cancellation" in says else StoreError)
    assert says in str(refused)
    driver.send(Added("ann"))
    assert query(driver, total).value == 2
    driver.check()


@pytest.mark.parametrize("own", [ZeroDivisionError, TimeoutError])
def test_its_own_error_is_raised_and_the_source_goes_on(driver: TestDriver[Any], own: type[Exception]) -> None:
    def fails(store: Any) -> None:
        raise own("its own")

    with pytest.raises(own, match="its own"):
        query(driver, fails)
    assert query(driver, len).value == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "one of the two"),
        ({"partition": 9}, "it has 0 to 0"),
        ({"partition": 0, "at_least": Delivery(Record("other", b""), 0, 5)}, "no record of an input"),
        ({"partition": 0, "at_least": {TopicPartition("other", 0): 5}}, "the inputs are added"),
        ({"partition": 0, "timeout_seconds": 0}, "more than 0"),
    ],
)
def test_bad_arguments_are_refused(driver: TestDriver[Any], arguments: dict[str, Any], says: str) -> None:
    source = driver._world.members[0].source
    with pytest.raises(ConfigError, match=says):
        driver._run(source.query(None, total, **arguments))
    with pytest.raises(ConfigError, match="it is that of the records"):
        driver._run(source.query(5, total))  # type: ignore[arg-type]


def test_by_key_it_goes_to_the_partition_of_the_records() -> None:
    with TestDriver(build(partitions=3)) as driver:
        for name in ("ann", "bob", "cid", "dan"):
            sent = driver.send(Added(name), key=name)
            answer = driver._run(driver._world.members[0].source.query(name, lambda store, name=name: store.get(name)))
            assert (answer.value, answer.partition) == (1, sent.partition)


def test_a_handler_must_not_wait_for_its_own_partition() -> None:
    async def handler(ctx: Any, event: Any) -> None:
        with pytest.raises(WouldDeadlock):
            await driver._world.members[0].source.query(None, len, partition=ctx.topic_partition.partition)
        count(ctx, event)

    with driven(handler) as driver:
        send(driver, "a")
        assert dict(driver.store(0).items()) == {"a": 1}


def test_a_store_that_cannot_undo_is_read_all_the_same() -> None:
    def handler(ctx: Any, event: Any) -> None:
        touch(ctx, event.name)

    with driven(handler, store=Words) as driver:
        send(driver, "a")
        assert query(driver, lambda store: dict(store.words)).value == {b"a": b"x"}


def test_it_has_its_turn_after_a_restart_of_the_partition(driver: TestDriver[Any]) -> None:
    driver.send(Added("ann"))
    engine = driver._world.members[0].engine
    assert engine is not None
    worker = engine.workers[0]
    restart = functools.partial(engine.partitions._begin_restart, worker, worker.failures, settle=False)
    driver._world.loop.call_soon(restart)
    assert query(driver, total).value == 1


def test_a_partition_of_another_member_is_refused() -> None:
    with TestDriver(build(partitions=2), members=2) as driver:
        other = 1 - (driver.owner(0) or 0)
        with pytest.raises(NotOwned):
            query(driver, total, member=other)


# -- the proof ---------------------------------------------------------------------------------------------------------


def ask_a_member_that_was_overtaken(frozen_for: float, *, confirm: bool = False, leased: bool = True) -> Any:
    """The owner has a lease, is cut off, and another one takes over and commits 2."""
    with TestDriver(build(partitions=2), members=2) as made:
        made.send(Added("ann"), partition=0)
        owner = made.owner(0)
        assert owner is not None
        source = made._world.members[owner].source
        if leased:
            made._run(source.query(None, total, partition=0))
        made.freeze(owner)
        if frozen_for > 6.0:
            made.send(Added("ann"), partition=0)
        made.advance(max(0.0, frozen_for - 6.0))

        async def ask() -> Any:
            task = asyncio.ensure_future(source.query(None, total, partition=0, confirm=confirm, timeout_seconds=60.0))
            await asyncio.wait([task], timeout=1.0)
            made.thaw(owner)
            return (await task).value

        return made._run(ask())


@pytest.mark.parametrize("confirm", [False, True])
def test_a_member_that_was_overtaken_does_not_answer(confirm: bool) -> None:
    with pytest.raises((NotOwned, MembershipLost)):
        ask_a_member_that_was_overtaken(10.0, confirm=confirm)


def test_without_the_end_of_the_lease_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadProofs, "has_lease", lambda self: self._lease is not None)
    assert ask_a_member_that_was_overtaken(10.0) == 1, "where the truth is 2"


def test_a_lease_ends_while_the_machine_sleeps(driver: TestDriver[Any]) -> None:
    """The clock of the lease goes on, that of the loop does not."""
    query(driver, total)
    engine = driver._world.members[0].source._run.engine
    assert engine is not None
    slept = engine.environment.elapsed_seconds() + 3600.0
    assert engine.read_proofs.has_lease()
    object.__setattr__(engine.environment, "elapsed_seconds", lambda: slept)
    assert not engine.read_proofs.has_lease()


def test_a_copy_of_a_changelog_that_was_made_again_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with TestDriver(build(partitions=1, num_standbys=1), members=2) as driver:
        driver.send(Added("ann"))
        driver.advance(2.0)
        owner = driver.owner(0)
        assert owner is not None
        source = driver._world.members[1 - owner].source
        local = source._run.queries()

        def ask() -> Any:
            return driver._run(local.query(0, total, max_staleness=1.0, timeout_seconds=3.0))

        answer = ask()
        assert (answer.value, answer.served_by) == (1, source.config.instance_id)
        identity = WireTakeOver.identity

        def another(self: WireTakeOver, topic: str, deadline: float) -> Any:
            return identity(self, topic, deadline)._replace(topic_id="another")

        monkeypatch.setattr(WireTakeOver, "identity", another)
        driver.advance(2.0)  # what is known of the end is too old then
        with pytest.raises(NotCaughtUp):
            ask()
        monkeypatch.undo()


def test_a_part_of_a_store_is_no_answer() -> None:
    class Bank(Stores):
        accounts = NamedTable.of(str, int)

    bank = Bank(ANN)
    for part in (bank.accounts, bank):
        assert "a part of it" in str(unfit(part, bank))
    assert unfit([("ann", 1)], bank) is None


def point(driver: TestDriver[Any], key: str, outcomes: list[Any], partition: int = 0) -> None:
    """Read a key as the HTTP service does; its outcome is appended."""
    question = Question(group="driven", kind="get", partition=partition, key=key.encode())

    async def ask() -> None:
        source = driver._world.members[0].source
        read = PointRead(question, asyncio.get_running_loop().create_future())
        source._run.queries().points.read([read], lambda one: one.waiter.set_result(None))
        await read.waiter
        outcomes.append(read.outcome)

    driver._world.loop.create_task(ask())


def test_a_key_that_nothing_changes_is_answered_before_the_commit(driver: TestDriver[Any]) -> None:
    """By the lease: its value is committed. One that the transaction changes waits for it."""
    driver.send(Added("bob"))
    query(driver, total)  # the lease
    found: list[Any] = []

    def asked(member: int) -> None:
        for key in ("ann", "bob"):
            point(driver, key, found)

    driver.at("send_offsets.before", asked)
    driver.at("commit.before", lambda member: found.append("commit"))
    driver.send(Added("ann"))
    driver.advance(1.0)
    bob, commit, ann = found
    assert commit == "commit"
    assert (bob.value, bob.positions) == (INTS.encode(1), (("added", 0, 1),)), "as of what is committed"
    assert (ann.value, ann.positions) == (INTS.encode(1), (("added", 0, 2),))


def test_without_a_lease_a_key_waits_for_its_proof(driver: TestDriver[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeats: list[str] = []
    monkeypatch.setattr(WireTakeOver, "is_member", beats(heartbeats, True))
    found: list[Any] = []
    for _ in range(3):
        point(driver, "ann", found)
    driver.advance(1.0)
    assert [one.value for one in found] == [None] * 3
    assert len(heartbeats) == 1
    point(driver, "ann", found)
    driver.advance(0.1)
    assert len(found) == 4
    assert len(heartbeats) == 1, "the lease holds"


def test_a_busy_partition_gets_its_lease(driver: TestDriver[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its looks would wait for commits for ever, and need none."""
    heartbeats: list[str] = []
    monkeypatch.setattr(WireTakeOver, "is_member", beats(heartbeats, True))
    found: list[Any] = []
    driver.at("send_offsets.before", lambda member: point(driver, "bob", found))
    driver.send(Added("ann"))
    driver.advance(1.0)
    assert len(found) == 1
    assert len(heartbeats) == 1


def test_a_key_of_a_partition_elsewhere(driver: TestDriver[Any]) -> None:
    found: list[Any] = []
    point(driver, "ann", found, partition=5)
    driver.advance(0.1)
    assert isinstance(found[0], NotOwned)
