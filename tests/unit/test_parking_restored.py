"""Queues of parked keys that come back: byte by byte, from wherever they were kept; and records that are spoilt."""

from __future__ import annotations

import base64
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams import PARK
from streams.cli.state_sources import parked_of
from streams.core.parking import PREFIX, Queued, queue_name
from streams.core.timers import Timer
from streams.disk import SQLite
from streams.errors import OffsetError
from streams.records import IncomingRecord, Record
from streams.runtime.changelog import encode_timer, timer_key
from streams.runtime.ownership.replica import Replica
from streams.runtime.ownership.replicas import Replicas
from streams.runtime.partition.state import Partition
from streams.sak.murmur2 import partition_of
from streams.settings import GroupConfig, StateConfig
from streams.testing import TestDriver
from tests.unit.parking_kit import Add, Bank, add, parked_records, redeploy

pytestmark = pytest.mark.usefixtures("quiet")
Records = dict[bytes, bytes]

KEPT = {
    "changelog": None,
    "folder": StateConfig(folder="state", checkpoint_seconds=1.0),
    "database": StateConfig(folder="state", checkpoint_seconds=1.0),
    "snapshot": StateConfig(folder="state", checkpoint_seconds=1.0, snapshots="snapshots", snapshot_seconds=2.0),
}


def fill(driver: TestDriver[Any]) -> None:
    """Queues with large events, odd bytes, a timer by reference, and one without key."""
    large = bytes(range(256)) * 3000  # in two pieces
    driver.send_record(Record("adds", large, b"\xff\xfe", [("odd", None), ("odd", b"\xff"), ("__grt__", b"Add")], 0))
    driver.send_record(Record("adds", None, b"\xff\xfe", None, 0))
    add(driver, 100, 1, 2)
    driver.advance(6)
    driver.send(Add(1), partition=0)
    driver.send(Add(1, "b"), key=b"", partition=0)


def encoded(timers: Mapping[str, Timer]) -> Records:
    """Timers as records of the changelog."""
    return {timer_key(name): encode_timer(timer) for name, timer in timers.items()}


def queues_of(records: Records) -> Records:
    """The records of queues among those of all timers."""
    return {key: value for key, value in records.items() if key.startswith(timer_key(PREFIX))}


@pytest.mark.parametrize("kind", KEPT)
def test_queues_are_restored_byte_by_byte(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = KEPT[kind]
    bank = Bank(decode_policy=PARK, **({} if state is None else {"state": state}))
    bank.engine = SQLite() if kind == "database" else None
    bank.broken = {1, 2}
    adopted: list[Records] = []
    adopt = Partition.adopt

    def seen(self: Partition, restored: Any) -> None:
        adopted.append(encoded(restored.timers))
        adopt(self, restored)
        # What a new owner has changed is in its memory only.
        assert encoded(self.timers.contents()) == adopted[-1]

    monkeypatch.setattr(Partition, "adopt", seen)
    with bank.driver(state_folder=str(tmp_path)) as driver:
        fill(driver)
        driver.advance(20)
        driver.skip_head("a")  # its numbers do not begin with that of its first event
        driver.advance(20)
        driver.leave()
        if kind == "snapshot":
            shutil.rmtree(tmp_path / "state")
        kept = parked_records(driver)
        assert (len(kept), sum(b"." in key[-10:] for key in kept)) == (11, 1), sorted(kept)  # one is a second piece
        if kind != "changelog":  # what it held before the mark is read from there, or nowhere
            receive = Replica.receive

            def without(self: Replica, records: list[IncomingRecord], *more: Any) -> Any:
                assert all(not (record.key or b"").startswith(timer_key(PREFIX)) for record in records), kind
                return receive(self, records, *more)

            monkeypatch.setattr(Replica, "receive", without)
        driver.restart()
        assert queues_of(adopted[-1]) == kept
        bank.broken = set()
        driver.advance(200)
        assert driver.store(0).get("a") == (100, 2, 101, 1)
        driver.check()


def test_a_member_keeps_the_queues_of_a_partition_that_it_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store stays as a copy: the partition comes back to it with all that waits there, byte by byte."""
    bank = Bank(num_partitions=2, group=GroupConfig(num_standbys=1))
    bank.broken = {1, 2}
    kept: list[bool] = []
    adopt = Replicas.adopt

    def seen(self: Replicas, partition: int, store: Any, offset: Any, timers: dict[str, Any], *more: Any) -> None:
        kept.append(queues_of(encoded(timers)) == parked_records(driver, partition) != {})
        adopt(self, partition, store, offset, timers, *more)

    with bank.driver(members=2) as driver:
        driver.leave(1)
        for key in ("a", "d"):  # one in each partition
            add(driver, 1, 2, key=key)
        monkeypatch.setattr(Replicas, "adopt", seen)
        driver.restart(1)
        driver.settle()
        assert kept
        assert all(kept)
        driver.leave(1)  # before anything else is known of these queues
        bank.broken = set()
        driver.advance(200)
        assert not driver.parked()
        assert {dict(driver.store(number).items()).get(key) for number in (0, 1) for key in "ad"} == {None, (1, 2)}
        driver.check()


def test_a_group_that_is_set_back_to_its_changelog_handles_no_queued_event_twice() -> None:
    """As ``kes offsets accept`` does after the changelog has lost its end: the queues belong to the same place."""
    bank = Bank()
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1, 2)
        broker = driver._world.broker
        log, (place,) = broker.log("bank.adds.changelog", 0), broker.offsets
        end, offset = log.end, broker.offsets[place]
        add(driver, 3)
        add(driver, 10, key="b")
        driver.leave()
        del log.entries[end:]
        with pytest.raises(OffsetError, match="kes offsets accept"):
            driver.restart()
        broker.offsets[place] = offset
        driver.restart(0)
        driver.settle()
        assert [record.offset for record in driver.parked()[0].events] == [0, 1, 2]
        bank.broken = set()
        driver.retry_parked("a")
        assert dict(driver.store(0).items()) == {"a": (1, 2, 3), "b": (10,)}


def test_a_start_warns_of_keys_that_were_parked_before_partitions_were_added(caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    bank = Bank(num_partitions=2)
    bank.broken = {1, 2}
    with bank.driver() as driver:
        driver.send(Add(1), key="a", partition=(other := 1 - partition_of(b"a", 2)))
        redeploy(driver)
        assert f"adds[{other}]: 1 parked key(s) belong to another one of 2 partitions (murmur2), b'a' to" in caplog.text
        caplog.clear()
        bank.broken = {2}
        driver.retry_parked("a")
        driver.send(Add(2), key="a")
        redeploy(driver)
        assert len(driver.parked()) == 1
        assert "belong to another" not in caplog.text


# -- records that are spoilt -------------------------------------------------------------------------------------------

HEAD = timer_key(queue_name(b"a"))


def event(records: Records, place: int = 0) -> bytes:
    """The key of the record of an event of the queue of ``a``."""
    return sorted(key for key in records if key.startswith(HEAD + b"/"))[place]


def numbers(records: Records, **fields: Any) -> None:
    """Change the numbers in the record of the queue of ``a``."""
    record = msgspec.json.decode(records[HEAD])
    state = msgspec.json.decode(base64.b64decode(record["value"]))
    there = {name: each(state[name]) if callable(each) else each for name, each in fields.items()}
    # As text: no encoder of ours takes such numbers.
    text = json.dumps(state | there)
    records[HEAD] = json.dumps(record | {"value": base64.b64encode(text.encode()).decode()}).encode()


def remade(records: Records, **fields: Any) -> None:
    """Change fields of the first event of ``a``."""
    found = msgspec.msgpack.decode(records[event(records)], type=Queued)
    records[event(records)] = msgspec.msgpack.encode(msgspec.structs.replace(found, **fields))


def put(records: Records, key: bytes, value: bytes) -> None:
    records[key] = value


SPOILT: dict[str, Callable[[Records], object]] = {
    "no record of the queue": lambda there: there.pop(HEAD),
    "no events": lambda there: [there.pop(event(there)) for _ in range(3)],
    "no event in the middle": lambda there: there.pop(event(there, 1)),
    "no last event": lambda there: there.pop(event(there, 2)),
    "no first piece": lambda there: put(there, event(there) + b".00000001", there.pop(event(there))),
    "a piece twice": lambda there: put(there, event(there) + b".00000001", there[event(there)]),
    "a piece too far": lambda there: put(there, event(there) + b".00000002", b""),
    "an event too many": lambda there: put(there, HEAD + b"/00000000", there[event(there)]),
    "an event that is cut": lambda there: put(there, event(there), there[event(there)][:-3]),
    "an empty event": lambda there: put(there, event(there), b""),
    "a queue that is cut": lambda there: put(there, HEAD, there[HEAD][:-3]),
    "an empty queue": lambda there: put(there, HEAD, b""),
    "a head that went on": lambda there: numbers(there, head=lambda head: head + 1),
    "a head that goes back": lambda there: numbers(there, head=lambda head: head - 1),
    "an end that goes back": lambda there: numbers(there, next=lambda end: end - 1),
    "an end before the head": lambda there: numbers(there, next=lambda end: end - 3),
    "a head below 0": lambda there: numbers(there, head=-5),
    "an absurd number": lambda there: numbers(there, next=1 << 80),
    "an absurd count": lambda there: numbers(there, next=1 << 62),
    "a number that is none": lambda there: numbers(there, head="x"),
    "a length that cannot be": lambda there: put(there, event(there), b"\xdd\xff\xff\xff\xff"),
    "a text that cannot be": lambda there: put(there, event(there), b"\x98\x02\x00\xdb\xff\xff\xff\xff"),
    "a newer event": lambda there: remade(there, v=3),
    "another kind of event": lambda there: remade(there, kind=7),
    "a newer queue": lambda there: put(there, HEAD, there[HEAD].replace(b'"v":2', b'"v":3')),
    "an event of another key": lambda there: remade(there, key=b"z"),
    "an event without its key": lambda there: remade(there, key=None),
    "text of another program": lambda there: put(there, event(there), b"hello"),
    "a name of another program": lambda there: put(there, HEAD + b"/nothing", b""),
    "a negative number in a name": lambda there: put(there, HEAD + b"/-1", b""),
    "a name that is no text": lambda there: put(there, HEAD + b"/\xff", b""),
    "a queue of another program": lambda there: put(there, timer_key(PREFIX), b"{}"),
}


@pytest.fixture(scope="module")
def whole() -> Records:
    """The records of a queue of three events."""
    bank = Bank()
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1, 2, 3)
        return parked_records(driver)


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_spoilt_records_are_an_error_that_names_partition_and_queue(
    whole: Records, spoil: Callable[[Records], object]
) -> None:
    """No half of a queue is ever shown, or acted on."""
    assert parked_of(7, whole).keys.events == 3
    spoil(records := dict(whole))
    with pytest.raises(OffsetError, match=r"partition 7|\[7\].*@park/") as failed:
        parked_of(7, records)
    assert "@park/" in str(failed.value)


@pytest.mark.parametrize("name", ["no record of the queue", "an event that is cut", "a newer queue", "an absurd count"])
def test_a_start_with_spoilt_records_is_refused(whole: Records, name: str) -> None:
    bank = Bank()
    with bank.driver() as driver:
        driver.leave()
        SPOILT[name](records := dict(whole))
        for key, value in records.items():
            driver._world.broker.append("bank.adds.changelog", 0, key, value, None, 1)
        with pytest.raises(OffsetError, match=r"(adds|changelog)\[0\].*@park/"):
            driver.restart()
    assert bank.attempts == []
