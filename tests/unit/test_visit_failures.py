"""What a visit cannot be, and what becomes of one that fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streams import DEAD_LETTER, SKIP, EventSource, Retry, Table
from streams.cli.rights import of_source
from streams.cli.topics import wanted_topics
from streams.errors import ConfigError, EventFailure, RegistrationError
from streams.records import TYPE_HEADER, Record
from streams.runtime.replay import PartitionReplay
from tests.unit.visits_kit import PARTITIONS, SEEN, VISITS, Ctx, Shop, build, config, driven, fill, look, once, seen
from tests.vocabulary import Put

# -- declared ----------------------------------------------------------------------------------------------------------


def test_requests_have_a_topic_of_the_source() -> None:
    source = build()
    spec = next(spec for spec in source.specs() if spec.name == VISITS)
    assert (spec.partitions, spec.configs["retention.ms"]) == (PARTITIONS, "-1")
    assert (source.inputs, source.input_topics()) == ([VISITS], [])
    assert ("visits", VISITS) in [(wanted.purpose, wanted.spec.name) for wanted in wanted_topics(source, [])]
    assert [topic.purpose for topic in source.topology.topics].count("visits") == 1
    assert [handler.event for handler in source.topology.handlers] == ["Put", "visit look"]
    assert '-- "requests" --> source' in source.topology.mermaid()
    assert not [one for one in of_source(source.config) if one.name == VISITS]  # it is read, as any input
    assert VISITS not in [spec.name for spec in build(visits=False).specs()]


def test_what_a_visit_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="visits is set beside source_bootstrap_servers"):
        config(source_bootstrap_servers="other:9092")
    with pytest.raises(ConfigError, match="visits"):
        config(visits="yes")
    with pytest.raises(ConfigError, match=r"the visit 'look' needs EventSourceConfig\(visits=True\)"):
        EventSource(config(visits=False)).register_visit("look", look)
    source = build()
    for name in ("", "a\n", "ü", "x" * 101, 7):
        with pytest.raises(ConfigError, match="the name of a visit is"):
            source.register_visit(name, look)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="there is a visit 'look' already"):
        source.register_visit("look", look)
    with pytest.raises(RegistrationError, match="the handler of the visit 'other'"):
        source.register_visit("other", lambda ctx: None)  # type: ignore[arg-type, misc]
    with driven(source) as driver:
        running = driver._world.members[0].source
        with pytest.raises(RegistrationError, match="comes too late"):
            running.register_visit("late", look)


@pytest.mark.parametrize(
    ("store", "table", "error"),
    [
        (Table.factory(key=str, value=int), None, "keeps no order of its keys"),
        (Shop.factory(), None, r"the store \(Shop\) is no Table"),
        (Shop.factory(), "nothing", r"'nothing' of the store"),
        (Shop.factory(), "others", "keeps no order of its keys"),
    ],
)
def test_a_table_that_cannot_be_visited_is_refused_at_the_start(store: Any, table: str | None, error: str) -> None:
    with pytest.raises(RegistrationError, match=error):
        driven(build(store=store, table=table))


async def test_a_replay_refuses_visits() -> None:
    with pytest.raises(ConfigError, match=r"further inputs \(shop\.orders\.visits\)"):
        PartitionReplay(build().program(), 0, wall_ms=0)


# -- failures ----------------------------------------------------------------------------------------------------------


def fails(attempts: int = 10**9) -> Callable[..., None]:
    def failing(ctx: Ctx, key: str, value: int) -> None:
        look(ctx, key, value)
        if key == "k001" and ctx.attempt <= attempts:
            raise ValueError("not this one")

    return failing


@pytest.mark.parametrize("policy", [DEAD_LETTER, SKIP])
def test_a_failure_is_that_of_one_key(policy: Retry) -> None:
    with driven(build(fails(), on_error=policy)) as driver:
        fill(driver, 5)
        driver.start_visit("look")
        assert seen(driver) == once(5) - Counter(["k001"])
        assert driver.store(0).get("k001") == 0, "undone"
        assert driver.visits(0)[0].ended == {"run": 5}
        letters = driver.dead_letters()
        assert len(letters) == (policy is DEAD_LETTER)
        for letter in letters:
            facts = {name: content for name, content in letter.headers or () if name.startswith("__kes_dlq_")}
            assert letter.key == b"k001"
            assert (facts["__kes_dlq_visit"], facts["__kes_dlq_run"]) == (b"look", b"run")
            assert (facts["__kes_dlq_error"], facts["__kes_dlq_offset"]) == (b"ValueError", b"-1")


def test_a_retry_and_a_stop() -> None:
    with driven(build(fails(2), on_error=Retry(attempts=3, backoff_seconds=0.01))) as driver:
        fill(driver, 5)
        driver.start_visit("look")
        assert seen(driver) == once(5)


def test_a_stop_is_met_again_by_the_next_start() -> None:
    handlers: Iterator[Callable[..., Any]] = iter((look, fails(), fails(), fails(), look))
    with driven(lambda: build(next(handlers))) as driver:
        fill(driver, 5)
        where = r"the visit 'look' \(run 'run'\) of the key b'k001' of orders\[0\] .* the next start meets it again"
        with pytest.raises(EventFailure, match=where):
            driver.start_visit("look")
        assert seen(driver) == once(1), "what was complete before is committed"
        with pytest.raises(EventFailure, match=where):
            driver.restart()
        driver.cancel_visit("look")
        driver.restart()
        assert driver.visits(0)[0].cancelled == {"run": 1}, "a request comes before the next key"
        driver.start_visit("look", run_id="next", wait=False)
        driver.crash()
        driver.restart()
        driver.settle()
        assert seen(driver, "next") == once(5)


def test_a_letter_that_is_sent_again_visits_its_key() -> None:
    """As ``kes dlq replay`` does, after the handler was repaired; a key that is gone is passed over."""
    for handler, options in ((fails(1), {}), (fails(1), {"blocking": True})):
        with driven(build(handler, on_error=DEAD_LETTER, **options)) as driver:
            fill(driver, 3)
            driver.start_visit("look")
            (letter,) = driver.dead_letters()
            headers = [(name, content) for name, content in letter.headers or () if not name.startswith("__kes_dlq")]
            again = Record("orders", letter.value, letter.key, headers, 0)
            source: Any = driver._world.members[0].source
            route, _ = source._declared.router.visits["look"]

            def repaired(ctx: Ctx, key: str, value: int) -> None:
                ctx.store.put(key, 100)

            route.handler = repaired
            driver.send_record(again)
            assert driver.store(0).get("k001") == 100
            driver.send(Put("k001", None), partition=0)
            driver.send_record(again)
            assert driver.store(0).get("k001") is None
            driver.check()


def test_a_letter_that_is_sent_again_meets_the_policy_of_its_visit() -> None:
    """And not that of the source, which would stop it at each start."""
    with driven(build(fails(), on_error=DEAD_LETTER)) as driver:
        fill(driver, 3)
        driver.start_visit("look")
        (letter,) = driver.dead_letters()
        headers = [(name, content) for name, content in letter.headers or () if not name.startswith("__kes_dlq")]
        driver.send_record(Record("orders", letter.value, letter.key, headers, 0))
        assert [one.key for one in driver.dead_letters()] == [b"k001", b"k001"]
        named = {(one.header("__kes_dlq_handler") or b"").decode() for one in driver.dead_letters()}
        assert named == {f"{__name__}.fails.<locals>.failing"}


def test_a_key_that_is_too_large_to_be_the_place_of_a_run_stops_it_by_name() -> None:
    """The state of the run would be refused behind each policy: the partition would be restored without end."""
    with driven(build(on_error=SKIP)) as driver:
        driver.send(Put("k" * 500_001, 0), partition=0)
        with pytest.raises(EventFailure, match=r"the visit 'look' .* the key has 500001 bytes.*kes visit --cancel"):
            driver.start_visit("look")
        driver.cancel_visit("look")
        driver.restart()
        assert driver.visits(0)[0].cancelled == {"run": 0}


def test_a_visit_cannot_cancel_what_keeps_its_run() -> None:
    def cancelling(ctx: Ctx, key: str, value: int) -> None:
        look(ctx, key, value)
        assert ctx.timer is not None
        assert not ctx.cancel_timer(ctx.timer.name)

    with driven(build(cancelling)) as driver:
        fill(driver, 5)
        driver.start_visit("look")
        assert seen(driver) == once(5)
        driver.start_visit("look")
        assert seen(driver) == once(5)


@pytest.mark.parametrize(
    "value",
    [
        b"no JSON",
        b"{}",
        b'{"visit":"","run":"r"}',
        b'{"visit":"look","run":""}',
        b'{"visit":"look","run":"%s"}' % (b"r" * 101),
    ],
)
def test_what_is_no_request_meets_a_policy(value: bytes) -> None:
    with driven(build(error_policy=DEAD_LETTER, decode_policy=DEAD_LETTER)) as driver:
        fill(driver, 2)
        driver.send_record(Record(VISITS, value, None, [(TYPE_HEADER, b"kes.visit")], 0))
        assert [letter.header("__kes_dlq_error") for letter in driver.dead_letters()] == [b"DecodeError"]
        assert (driver.visits(0), seen(driver)) == ((), Counter())


def test_a_run_is_requested_in_the_topic_of_requests_only() -> None:
    """Else the right to write events would be the right to start runs over all keys."""
    with driven(build(error_policy=DEAD_LETTER)) as driver:
        fill(driver, 2)
        value = b'{"visit":"look","run":"r"}'
        driver.send_record(Record("orders", value, None, [(TYPE_HEADER, b"kes.visit")], 0))
        (letter,) = driver.dead_letters()
        assert (letter.header("__kes_dlq_message") or b"").endswith(
            b"records of shop.orders.visits, where it takes a right of its own"
        )
        assert (driver.visits(0), seen(driver)) == ((), Counter())


def test_what_is_sent_again_for_a_visit_that_is_not_there_is_its_events_error() -> None:
    with driven(build(error_policy=DEAD_LETTER)) as driver:
        driver.send_record(
            Record("orders", b'{"visit":"gone","run":"r","action":"again"}', b"k", [(TYPE_HEADER, b"kes.visit")], 0)
        )
        (letter,) = driver.dead_letters()
        assert letter.header("__kes_dlq_message") == b"this source has no visit 'gone'"


def test_a_refused_output_is_that_of_its_key() -> None:
    """The broker refuses it: the partition is restored, and the key meets its policy, as any event."""

    def large(ctx: Ctx, key: str, value: int) -> None:
        look(ctx, key, value)
        if key == "k002":
            ctx.forward(Record(SEEN, bytes(900_000), b"large", partition=0))

    with driven(build(large, on_error=SKIP)) as driver:
        driver._world.broker.limits[SEEN] = 1_000
        fill(driver, 5)
        driver.start_visit("look")
        assert seen(driver) == once(5) - Counter(["k002"])
        driver.check()
