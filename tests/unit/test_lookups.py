"""Lookups: whole topics as tables in handlers, which never run backwards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from streams import SKIP, STOP, EventContext
from streams.errors import (
    BrokerUnavailable,
    ConfigError,
    NotCaughtUp,
    OffsetError,
    RecordError,
    RegistrationError,
    StoreError,
    TopicError,
)
from streams.observability import catalogue
from streams.records import IncomingRecord
from streams.runtime.changelog import OffsetRecord
from streams.runtime.ownership.takeover import TakeOvers
from streams.runtime.reading.lookups import Lookups
from streams.runtime.reading.view_follower import Following, Receiver
from streams.runtime.replay import PartitionReplay
from streams.runtime.signal import Broadcast
from streams.testing import TestDriver
from streams.testing.driver_base import Unsettled
from streams.testing.simulation.broker import LogEntry, printed_id
from tests.unit.joins_kit import say
from tests.unit.lookups_kit import RATES, Shop, hold, pay, position_of, rate, raw, seen
from tests.vocabulary import INTS, Named, Ring

# -- in handlers -------------------------------------------------------------------------------------------------------


def test_handlers_of_all_partitions_look_into_the_whole_topic() -> None:
    with TestDriver(Shop().source, topics={RATES: 3}) as driver:
        for key, value in {"EUR": 1, "GBP": 2, "USD": 3}.items():
            rate(driver, value, key)
        for partition in (0, 1):
            pay(driver, partition, "EUR", wait=False)
            pay(driver, partition, "GBP")
        driver.table(RATES).delete("EUR")
        pay(driver)
        assert seen(driver) == ["EUR at 1", "GBP at 2"] * 2 + ["EUR at None"]
        driver.check()


def test_a_table_is_complete_before_the_first_event() -> None:
    shop = Shop()
    with TestDriver(shop.source, start=False) as driver:
        for number in range(500):
            rate(driver, number, f"c{number}", wait=False)
        rate(driver, 7, wait=False)
        pay(driver, wait=False)
        driver.start()
        driver.settle()
        assert seen(driver) == ["EUR at 7"]
        assert shop.rates is not None
        assert len(driver.lookup(shop.rates)) == 501


def test_interjections_timers_and_handlers_ahead_of_their_turn_look_too() -> None:
    shop = Shop()
    assert shop.rates is not None
    rates = shop.rates

    async def ahead(ctx: EventContext[Any], event: Named) -> None:
        found = ctx.lookup(rates).get("EUR")
        await ctx.turn()
        say(ctx, f"ahead {found}, then {ctx.lookup(rates).get('EUR')}")
        ctx.schedule_in(1.0, Ring("EUR"))

    shop.source.register_event_type(Named, ahead, concurrency=2)
    shop.source.register_event_type(Ring, lambda ctx, event: say(ctx, f"rung {ctx.lookup(rates).get('EUR')}"))
    with TestDriver(shop.source) as driver:
        rate(driver, 5)
        driver.send(Named("EUR"), partition=0)
        driver.advance(2.0)
        assert driver.interject(0, lambda ctx: ctx.lookup(rates).get("EUR")) == 5
        assert seen(driver) == ["ahead 5, then 5", "rung 5"]


def test_another_sources_lookup_is_refused() -> None:
    shop, other = Shop(), Shop()
    assert shop.rates is not None
    assert other.rates is not None
    own, foreign, kept = shop.rates, other.rates, list[EventContext[Any]]()

    def look(ctx: EventContext[Any]) -> None:
        with pytest.raises(StoreError, match=r"Lookup\('rates'\) is no lookup of this source"):
            ctx.lookup(foreign)
        kept.append(ctx)

    with TestDriver(shop.source) as driver:
        driver.interject(0, look)
        with pytest.raises(StoreError, match="after the handler"):
            kept[0].lookup(own)


# -- never backwards ---------------------------------------------------------------------------------------------------


def test_the_receiver_of_a_move_waits_until_its_table_is_as_far_as_the_donors() -> None:
    with TestDriver(Shop(num_standbys=1).source, members=2) as driver:
        rate(driver, 1)
        pay(driver, 0)
        pay(driver, 1)
        donor = driver.owner(0)
        assert donor is not None
        receiver = 1 - donor
        go_on = hold(driver, receiver)
        rate(driver, 2)
        pay(driver, 0)
        assert seen(driver)[-1] == "EUR at 2"
        driver.at("release.committed", driver.crash, member=donor)  # right after the marker
        driver._world.members[donor].source._run.ask_to_stop(drain=True)
        driver.advance(30.0)
        pay(driver, 0, wait=False)
        driver.advance(10.0)
        assert driver.owner(0) is None, "it waits"
        assert driver.statistics(receiver).lookups[0].is_awaited
        assert seen(driver) == []
        go_on()
        driver.settle()
        assert seen(driver) == ["EUR at 2"]
        assert not driver.statistics(receiver).lookups[0].is_awaited
        driver.check()


def test_a_donors_position_that_cannot_be_read_is_met_by_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and by name. As an error of a callback it would hold up the partition until the group is asked again."""
    with TestDriver(Shop().source) as driver:
        pay(driver)
        taken, met = TakeOvers.take_over, list[int]()

        async def take_over(self: TakeOvers, workers: Any) -> None:
            met.extend(worker.partition for worker in workers)
            monkeypatch.undo()
            await taken(self, workers)

        def unreadable(self: OffsetRecord, topic: str) -> None:
            raise OffsetError("a newer version")

        monkeypatch.setattr(TakeOvers, "take_over", take_over)
        monkeypatch.setattr(OffsetRecord, "position_of_lookup", unreadable)
        began = driver.now
        driver.join()
        driver.settle()
        assert len(met) == 1
        assert driver.now - began < 5


def crashed_behind(driver: TestDriver[Any]) -> Callable[[], None]:
    """Have the owner of partition 0 look into a row, without any record of that, and die; its successor's table has not
    got the row. Returns what lets that table go on."""
    rate(driver, 1)
    pay(driver)
    owner = driver.owner(0)
    assert owner is not None
    go_on = hold(driver, 1 - owner)
    rate(driver, 2)
    rates = next(iter(driver._world.members[owner].source._declared.lookups.by_topic.values()))
    assert driver.interject(0, lambda ctx: ctx.lookup(rates).get("EUR")) == 2
    assert position_of(driver) == (printed_id(RATES), (1, 0))
    driver.crash(owner)
    pay(driver, wait=False)
    driver.advance(15.0)
    return go_on


def test_after_a_crash_the_successor_waits_for_what_was_looked_into_without_a_record() -> None:
    with TestDriver(Shop(num_standbys=1).source, members=2) as driver:
        go_on = crashed_behind(driver)
        assert driver.owner(0) is None
        go_on()
        driver.settle()
        assert seen(driver) == ["EUR at 1", "EUR at 2"]
        driver.check()


def test_without_the_ends_that_a_takeover_waits_for_it_would_look_into_an_older_table(monkeypatch: Any) -> None:
    async def wait_stable(self: Lookups) -> None: ...

    monkeypatch.setattr(Lookups, "wait_stable", wait_stable)
    with TestDriver(Shop(num_standbys=1).source, members=2) as driver:
        crashed_behind(driver)
        assert seen(driver) == ["EUR at 1", "EUR at 1"]


def test_a_table_that_does_not_get_there_in_time_stops_the_source() -> None:
    options = {"timeout_seconds": 5.0}
    with (
        TestDriver(Shop(num_standbys=1, options=options).source, members=2) as driver,
        pytest.raises(
            NotCaughtUp, match=r"the lookup rates: not caught up within 5 s: \[0\] at 1 of 2 .*timeout_seconds"
        ),
    ):
        crashed_behind(driver)


def test_an_open_transaction_in_the_topic_holds_up_no_partition() -> None:
    with TestDriver(Shop().source, topics={RATES: 1}, start=False) as driver:
        rate(driver, 1, wait=False)
        broker = driver._world.broker
        epoch = broker.init("feeder", 600.0)
        assert epoch is not None
        broker.produce("feeder", epoch, RATES, 0, LogEntry(b"EUR", INTS.encode(2), None, None))
        pay(driver, wait=False)
        with pytest.raises(Unsettled, match="readers wait at offset 1 for feeder"):
            driver.start()
        assert seen(driver) == ["EUR at 1"]
        broker.end("feeder", epoch, True)
        driver.advance(5)
        pay(driver)
        assert seen(driver) == ["EUR at 2"]


class HeldTail:
    """``ports.Tail`` in the hands of a test."""

    def start(self, receive: Callable[..., None], fail: Callable[..., None]) -> None:
        self.receive = receive

    def add(self, partition: int, offset: int, epoch: int) -> None:
        self.epoch = epoch

    def remove(self, partitions: Collection[int]) -> None: ...
    def close(self) -> None: ...


def test_a_record_counts_as_looked_into_before_it_is_in_the_table() -> None:
    tail, places = HeldTail(), list[Any]()
    receiver = Receiver("r", lambda record: places.append(following.positions), None)
    following = Following(RATES, tail, [receiver], STOP, lambda: None, lambda partition, error: None)
    following.grow(1)
    places.append(following.positions)
    tail.receive(0, tail.epoch, [IncomingRecord(RATES, 0, 5, b"k", b"v", None, 0)], 9, 9)
    assert [*places, following.positions] == [((0, 0),), ((5, 6),), ((9, 9),)]


async def test_the_time_without_the_cluster_is_not_that_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers again shortly before the time is over: the take-over asks again, and the source does not stop."""
    rates, clients, outages = Shop().rates, SimpleNamespace(worker=lambda: None), [True, False]
    assert rates is not None
    lookups = Lookups([rates], lambda topic: clients)
    read: Any = lookups._readings[RATES].reader

    async def loss(deadline: float) -> None: ...

    async def wait_stable(seconds: float) -> None:
        read._changed, read.is_cut_off = Broadcast(), outages.pop(0)
        await read._check_topic(
            SimpleNamespace(grow=lambda partitions: None), SimpleNamespace(loss=loss, partitions=1), 0.0
        )
        raise NotCaughtUp("rates: not caught up within 300 s")

    monkeypatch.setattr(read, "wait_stable", wait_stable)
    for kind in (BrokerUnavailable, NotCaughtUp):
        with pytest.raises(kind, match="not caught up within 300 s"):
            await lookups.wait_stable()


def test_a_broker_that_does_not_know_a_new_partition_yet_is_asked_again() -> None:
    with TestDriver(Shop().source, topics={RATES: 2}) as driver:
        for key in ("EUR", "GBP", "USD", "SEK"):
            rate(driver, 1, key)
        pay(driver)
        world = driver._world
        driver.crash()
        world.broker.topics[RATES] = 1
        world.loop.call_later(20.0, world.broker.topics.update, {RATES: 2})
        driver.restart()
        driver.settle()
        pay(driver, 0, "GBP")
        assert seen(driver) == ["EUR at 1", "GBP at 1"]


# -- what is wrong with the topic --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["made again", "shorter"])
def test_a_topic_that_is_not_what_handlers_have_looked_into_is_refused(how: str) -> None:
    with TestDriver(Shop().source, topics={RATES: 1}) as driver:
        rate(driver, 1)
        pay(driver)
        driver.crash()
        broker = driver._world.broker
        if how == "made again":
            broker.recreate(RATES)
            expected = rf"orders\[0\]: .* the topic rates with the id {printed_id(RATES)}, which was deleted.*made_anew"
        else:
            broker.log(RATES, 0).entries.clear()
            expected = r"orders\[0\]: .* looked into rates\[0\] up to offset 1, but that ends at 0: .*lost records"
        with pytest.raises(OffsetError, match=expected):
            driver.restart()


def test_a_topic_that_was_made_anew_on_purpose() -> None:
    with TestDriver(Shop(options={"may_be_made_anew": True}).source, topics={RATES: 1}) as driver:
        rate(driver, 1)
        pay(driver)
        driver.crash()
        driver._world.broker.recreate(RATES)
        driver.restart()
        pay(driver)
        assert seen(driver) == ["EUR at 1", "EUR at None"]
        assert position_of(driver) == (printed_id(RATES, 1), (0,))


@pytest.mark.parametrize(
    ("happens", "kind", "text"),
    [
        ("deleted", TopicError, "the lookup rates cannot be read on: topic rates does not exist any more"),
        ("made again", OffsetError, "the lookup rates cannot be read on: topic rates was deleted and created again"),
        ("no key", RecordError, r"the lookup rates .*rates\[0\]@1 .*the record has no key"),
        ("no number", RecordError, r"the lookup rates .*rates\[0\]@1 can not be received by the lookup rates"),
    ],
)
def test_what_ends_a_lookup_stops_the_source_and_no_event_meets_a_policy(
    happens: str, kind: type[Exception], text: str
) -> None:
    """While the source stops, its handlers go on with the table as it was: none of them fails, none is skipped."""
    with TestDriver(Shop(error_policy=SKIP).source, topics={RATES: 1}) as driver:
        rate(driver, 1)
        pay(driver)
        broker = driver._world.broker
        for _ in range(50):
            pay(driver, wait=False)
        if happens == "deleted":
            broker.blocked[RATES] = 3
        elif happens == "made again":
            broker.recreate(RATES)
        else:
            raw(driver, None if happens == "no key" else b"EUR", b"x", wait=False)
        with pytest.raises(kind, match=text):
            driver.advance(20.0)
        assert set(seen(driver)) == {"EUR at 1"}


def test_a_row_that_cannot_be_taken_may_be_skipped() -> None:
    with TestDriver(Shop(options={"on_error": SKIP}).source, topics={RATES: 1}) as driver:
        rate(driver, 1)
        raw(driver, b"EUR", b"x")
        raw(driver, None, b"2")
        pay(driver)
        assert seen(driver) == ["EUR at 1"]
        figures = driver.statistics().lookups[0]
        assert (figures.topic, figures.is_complete, figures.records, figures.skipped) == (RATES, True, 3, 2)
        samples = {sample[0].name: sample[1] for sample in catalogue.figures(driver.statistics()) if RATES in sample[2]}
        assert samples["kes_lookup_records"] == 3


# -- declared ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "options", "error", "text"),
    [
        ("a b", {}, ConfigError, "the topic of source.lookup"),
        (RATES, {}, RegistrationError, "the lookup 'rates' is declared twice"),
        ("orders", {}, RegistrationError, "the event source's own"),
        ("new", {"timeout_seconds": 0}, ConfigError, "timeout_seconds of source.lookup"),
        ("new", {"timeout_seconds": True}, ConfigError, "timeout_seconds of source.lookup"),
        ("new", {"key": float, "ordered": True}, ConfigError, "does not keep keys in order"),
        ("new", {"on_error": "skip"}, ConfigError, "on_error is 'skip'"),
    ],
)
def test_a_declaration_that_cannot_be(topic: str, options: dict[str, Any], error: type[Exception], text: str) -> None:
    source = Shop().source
    with pytest.raises(error, match=text):
        source.lookup(topic, **{"key": str, "value": int, **options})
    source._declared.router.freeze()
    with pytest.raises(RegistrationError, match="too late"):
        source.lookup("later", key=str, value=int)


def test_what_is_seen_from_outside() -> None:
    source = Shop().source
    assert source.lookups == [RATES]
    (spec,) = source.lookup_topics()
    assert (spec.name, spec.partitions, spec.may_have_more) == (RATES, 1, True)
    assert spec.configs == {"cleanup.policy": "compact"}
    topic = source.topology.topics[-1]
    assert (topic.name, topic.purpose, topic.size) == (RATES, "lookup", "all partitions")
    assert '-- "rows" --> source' in source.topology.mermaid()


async def test_a_replay_refuses_them_by_name() -> None:
    with pytest.raises(ConfigError, match=r"a replay takes .* lookups \(rates\): which row of another topic"):
        PartitionReplay(Shop().source.program(), 0, wall_ms=0)
