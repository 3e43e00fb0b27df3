"""A muted source: never beyond the one that it follows, sends nothing, and never speaks by accident."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from streams import AsyncJobScheduler, GroupConfig, Table, event_type
from streams.errors import ConfigError, OffsetError, TopicReplaced
from streams.events import to_record
from streams.observability.catalogue import BEHIND_FOLLOWED, MUTED_RECORDS, figures
from streams.outcomes import DEAD_LETTER, PARK
from streams.records import Change, Record, TopicPartition
from streams.runtime.changelog import (
    KEPT_PREFIXES,
    MUTED,
    OFFSET_KEY,
    VOICE_KEY,
    OffsetRecord,
    VoiceRecord,
    decode_offset,
)
from streams.runtime.ownership.replica import Replica
from streams.testing import TestDriver
from tests.unit import muted_kit
from tests.unit.muted_kit import BROKEN, OLDS, OUT, TOPIC, Beside, Deposit, build


@event_type("Other")
class Other(msgspec.Struct, frozen=True):
    name: str


T0 = 1_699_999_000_000


@contextmanager
def beside(**more: Any) -> Iterator[tuple[TestDriver[Any], Beside]]:
    """A muted source at work, which knows nothing of OLD."""
    with TestDriver(build(**more), start=False) as driver:
        old = Beside(driver)
        old.mute()
        driver.start()
        yield driver, old


def send(driver: TestDriver[Any], *events: object, topic: str = "") -> None:
    for event in events:
        driver.send(event, key="a", partition=0, topic=topic, wait=False)
    driver.advance(1)


def state(driver: TestDriver[Any]) -> dict[str, int]:
    return dict(driver.store(0).items())


def offset_records(driver: TestDriver[Any]) -> list[Any]:
    return [decode_offset(one) for one in driver.outputs(driver._world.config.changelog) if one.key == OFFSET_KEY]


def test_it_follows_and_sends_nothing() -> None:
    with beside() as (driver, old):
        send(driver, *[Deposit("a", 5)] * 4)
        assert state(driver) == {}, "nothing is known of OLD"
        assert driver.statistics().partitions[0].lag_seconds[TOPIC] > 0, "what waits is behind, too"
        old.at(2)
        driver.advance(1)
        assert state(driver) == {"a": 10}
        old.at(3)
        driver.advance(1)
        assert state(driver) == {"a": 15}
        assert driver.outputs(OUT) == []
        found = driver.statistics()
        assert (found.shadow_of, found.muted_records) == ("bank", {OUT: 3})
        assert found.partitions[0].behind_followed == 0
        samples = list(figures(found))
        assert (BEHIND_FOLLOWED, 0, ("0",)) in samples
        assert (MUTED_RECORDS, 3, (OUT,)) in samples
        records = offset_records(driver)
        assert records[-1].offset == 3
        assert {one.changelog_id for one in records} == {MUTED + records[-1].ids.changelog}
        driver.crash()
        driver._world.start(1)
        driver.advance(30)
        assert state(driver) == {"a": 15}
        old.at(4)
        driver.advance(1)
        assert state(driver) == {"a": 20}


def test_its_figures_are_there_before_it_works() -> None:
    with TestDriver(build(), start=False) as driver:
        old = Beside(driver)
        old.mute()
        old.at(0)
        driver._world.start(0)
        known = set()
        for _ in range(200):
            driver.advance(0.02)
            known |= {(one.state, one.behind_followed) for one in driver.statistics().partitions}
        assert known >= {("restoring", None), ("active", 0)}


def test_a_position_before_all_is_read_is_not_believed() -> None:
    with TestDriver(build(), start=False) as driver:
        old = Beside(driver)
        old.mute()
        old.at(3)
        old.at(1)  # by a reset
        driver.start()
        send(driver, *[Deposit("a", 1)] * 3)
        assert state(driver) == {"a": 1}


def test_a_position_that_goes_back_stops_it_by_name() -> None:
    with beside() as (driver, old):
        old.at(2)
        send(driver, *[Deposit("a", 1)] * 3)
        old.at(1)
        with pytest.raises(OffsetError, match=r"bank.deposits.changelog\[0\]: the group bank, .*went back from 2 to 1"):
            driver.advance(1)
    with beside() as (driver, old):
        old.at(2)
        send(driver, *[Deposit("a", 1)] * 3)
        driver.crash()
        old.at(1)
        driver._world.start(1)
        with pytest.raises(OffsetError, match="position in deposits is 1, and the muted source is at 2 already"):
            driver.advance(30)


def test_one_that_is_muted_itself_or_another_topic_is_not_followed() -> None:
    with beside() as (driver, old):
        old.voice()
        with pytest.raises(OffsetError, match="it is muted itself"):
            driver.advance(1)
    with beside() as (driver, old):
        position = OffsetRecord(1, "old", 0, 0, "the id of another topic", old.id_of(OLDS))
        old.broker.append(OLDS, 0, OFFSET_KEY, msgspec.json.encode(position), None)
        with pytest.raises(OffsetError, match="it reads another topic of that name"):
            driver.advance(1)
    with beside() as (driver, _):
        driver._world.broker.recreate(OLDS)
        with pytest.raises(TopicReplaced, match=r"bank.deposits.changelog, .* created again"):
            driver.advance(200)


REFUSED = "shadow_of is 'bank', and the changelog does not say that the partition is muted"


@pytest.mark.parametrize(
    ("settings", "records", "said"),
    [
        ({}, {"voice": False, "mark": False}, REFUSED),
        ({}, None, REFUSED),
        ({"shadow_of": ""}, {}, "is muted and follows bank; shadow_of is ''"),
        ({"shadow_of": "bonk"}, {}, "is muted and follows bank; shadow_of is 'bonk'"),
        ({}, {"voice": False}, "says by one record that the partition is muted, and by another one"),
        ({}, {"mark": False}, "says by one record"),
        ({"shadow_of": ""}, {"voice": False}, "says by one record"),
        ({"shadow_of": ""}, {"mark": False}, "says by one record"),
    ],
)
def test_records_and_settings_have_to_agree(settings: Any, records: Any, said: str) -> None:
    with TestDriver(build(**settings), start=False) as driver:
        if records is not None:
            Beside(driver).mute(**records)
        driver.send(Deposit("a", 1), key="a", partition=0, wait=False)
        with pytest.raises(ConfigError, match=said):
            driver.start()
        assert driver.outputs(OUT) == []


def test_a_member_without_the_setting_takes_no_partition_over_from_one_that_has_it() -> None:
    settings: dict[str, Any] = {"shadow_of": "bank"}
    with TestDriver(lambda: build(2, **settings), start=False) as driver:
        Beside(driver).mute()
        driver.start()
        settings["shadow_of"] = ""
        driver._world.start(1)
        with pytest.raises(ConfigError, match="is muted and follows bank; shadow_of is ''"):
            driver.advance(60)


def test_the_voice_goes_where_the_state_goes() -> None:
    """Out of a folder, and back to a member that has kept a warm copy."""
    told = VoiceRecord(group="bank", changelog=OLDS, changelog_id="id", by="kit", at_ms=1)

    def voice_in(value: bytes | None) -> VoiceRecord | None:
        copy = Replica(0, 1, Table.factory(key=str, value=int)(TopicPartition(TOPIC, 0)), 0.0)
        copy.restore([Change(VOICE_KEY, value)])
        return copy.voice

    assert (voice_in(msgspec.json.encode(told)), voice_in(None)) == (told, None)
    assert VOICE_KEY in KEPT_PREFIXES
    with TestDriver(build(2, group=GroupConfig(num_standbys=1)), start=False) as driver:
        old = Beside(driver)
        old.mute()
        driver.start()
        driver._world.start(1)
        driver.advance(60)
        moved = next(number for number in (0, 1) if driver.owner(number) == 1)
        driver.crash(1)
        driver.advance(60)
        assert driver.owner(moved) == 0
        driver.send(Deposit("b", 1), key="b", partition=moved, wait=False)
        old.at(1, moved)
        driver.advance(1)
        assert dict(driver.store(moved).items()) == {"b": 1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shadow_of": "bank.v2"}, "the group_id itself: a source cannot follow itself"),
        ({"shadow_of": "a b"}, "shadow_of"),
        ({"loop": True}, "loop is set beside shadow_of"),
        ({"visits": True}, "visits is set beside shadow_of"),
        ({"start_at": "latest"}, "start_at is set beside shadow_of"),
        ({"source_bootstrap_servers": "there:1"}, "source_bootstrap_servers is set beside shadow_of"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(**settings)


def test_what_calls_outside_is_refused_at_the_start_too() -> None:
    source = build()

    async def charge(ctx: Any, event: Other) -> None: ...

    async def job(item: object) -> None: ...

    source.register_event_type(Other, charge, concurrency=3)
    AsyncJobScheduler(source, job)
    source.schedule_interjection(lambda ctx: None, every=5.0)
    with pytest.raises(ConfigError, match=r"interjection .*, the jobs .*job.*, the concurrent handler of Other"):
        TestDriver(source).close()


def test_a_timer_of_a_parked_key_waits_in_its_queue_and_fires_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are tried again by the clock: a failure of its own is no cause of the other source."""
    monkeypatch.setattr("tests.unit.muted_kit.HEALED", set())
    with beside(error_policy=PARK) as (driver, old):
        events = [Deposit("a", 1, 10), Deposit("a", BROKEN), Deposit("b", 1), Deposit("b", 1)]
        for event, second in zip(events, (0, 1, 20, 21), strict=True):
            key = "b" if event.account == "b" else "a"
            driver.send_record(msgspec.structs.replace(record(event, T0 + 1000 * second), key=key.encode()), wait=False)
        old.at(4)
        driver.advance(2)
        assert state(driver) == {"a": 1, "b": 2}
        driver.crash()
        driver._world.start(1)
        driver.advance(30)
        muted_kit.HEALED.add(BROKEN)
        driver.advance(600)
        assert state(driver) == {"a": 1 + BROKEN, "a reminded": 1, "b": 2}
        assert driver.outputs(OUT) == []


def test_between_two_events_it_goes_by_the_clock() -> None:
    with beside() as (driver, old):
        driver.send_record(record(Deposit("a", 1), T0), wait=False)
        old.at(1)
        driver.advance(1)
        now = driver.interject(0, lambda ctx: ctx.now.timestamp())
        assert now >= driver.time() - 1 > T0 / 1000 + 900
        assert driver.interject(0, lambda ctx: ctx.is_muted)


def test_dead_letters_are_dropped_too() -> None:
    with beside(error_policy=DEAD_LETTER, decode_policy=DEAD_LETTER) as (driver, old):
        driver.send_record(Record(TOPIC, b"{", b"a", partition=0), wait=False)
        old.at(1)
        driver.advance(1)
        assert driver.outputs(driver._world.config.dead_letters) == []
        assert offset_records(driver)[-1].offset == 1


def test_several_inputs_wait_for_their_own_positions() -> None:
    with beside(inputs=("more",)) as (driver, old):
        send(driver, Deposit("a", 1), Deposit("a", 1))
        send(driver, Deposit("a", 10), Deposit("a", 10), topic="more")
        old.at(1, further={"more": 0})
        driver.advance(2)
        assert state(driver) == {"a": 1}
        old.at(1, further={"more": 2})
        driver.advance(2)
        assert state(driver) == {"a": 21}
        assert driver.outputs(OUT) == []


def test_a_timer_fires_before_the_first_record_of_its_time_unless_old_has_it() -> None:
    with beside() as (driver, old):
        at = [T0 + 1000, T0 + 2000, T0 + 20_000, T0 + 20_001]
        for number, time_ms in enumerate(at):
            event = Deposit("a", 1, remind=10 if number == 0 else 0)
            driver.send_record(record(event, time_ms), wait=False)
        old.timer("a", at[0] + 10_300, by=0)
        old.at(2)
        driver.advance(60)
        assert state(driver) == {"a": 2}, "never by the clock"
        old.timer("a", None)
        old.at(3)
        driver.advance(1)
        assert state(driver) == {"a": 3, "a reminded": 1}
        assert driver.outputs(OUT) == []


@pytest.mark.parametrize(
    ("later_ms", "by", "has_it"), [(0, 0, True), (300, 1, True), (300, 2, False), (300, 0, False), (-1, 1, True)]
)
def test_a_timer_is_olds_by_its_time_or_by_the_event_that_has_set_it(later_ms: int, by: int, has_it: bool) -> None:
    with beside() as (driver, old):
        for event, time_ms in ((Deposit("a", 1), T0), (Deposit("a", 1, 10), T0 + 1000), (Deposit("a", 1), T0 + 20_000)):
            driver.send_record(record(event, time_ms), wait=False)
        old.timer("a", T0 + 11_000 + later_ms, by)
        old.at(3)
        driver.advance(1)
        assert state(driver) == {"a": 3} | ({} if has_it else {"a reminded": 1})
        old.timer("a", T0 + 50_000, 9)  # set anew: NEW's is fired by the next record
        driver.send_record(record(Deposit("a", 1), T0 + 20_001), wait=False)
        old.at(4)
        driver.advance(1)
        assert state(driver) == {"a": 4, "a reminded": 1}


def test_timers_outlive_a_restart_and_a_cancelled_one_does_not_fire() -> None:
    with beside() as (driver, old):
        driver.send_record(record(Deposit("a", 1, 10), T0 + 1000), wait=False)
        old.at(1)
        driver.advance(1)
        driver.crash()
        driver._world.start(1)
        driver.advance(30)
        driver.send_record(record(Deposit("a", 1), T0 + 20_000), wait=False)
        driver.send_record(record(Deposit("a", 1, 10), T0 + 21_000), wait=False)
        driver.send_record(record(Deposit("a", -1), T0 + 22_000), wait=False)
        driver.send_record(record(Deposit("a", 1), T0 + 40_000), wait=False)
        old.at(5)
        driver.advance(1)
        assert state(driver) == {"a": 3, "a reminded": 1}


def record(event: Deposit, time_ms: int) -> Any:
    return msgspec.structs.replace(to_record(TOPIC, event, key="a", partition=0), timestamp_ms=time_ms)
