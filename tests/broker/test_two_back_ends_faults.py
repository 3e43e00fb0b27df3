"""The driver's answers are the broker's: members that come, go and die, lost replies, fenced producers; and a driver
that is wrong is found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streams.testing.fixtures import BrokerAddress
from streams.testing.simulation.broker import Broker, Log
from tests.broker.back_ends_kit import BackEnd, Scenario, feed, scenario, telling
from tests.broker.two_back_ends import compare, must_be_equal
from tests.vocabulary import Added

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

NAMES = ["a", "b", "c", "d", "e", "f", "a", "b", "a"]


@scenario(partitions=4, topics={"out": 2})
def members(end: BackEnd) -> None:
    """Partitions move to a member that joins, and to the one that stays."""
    end.run(telling(end))
    feed(end, *NAMES)
    end.settle()
    end.join()
    feed(end, *NAMES)
    end.settle()
    end.leave(0)
    feed(end, *NAMES)
    end.settle()


SCENARIOS = [members]


@pytest.mark.parametrize("one", SCENARIOS, ids=str)
def test_same_answers(kafka_broker: BrokerAddress, one: Scenario) -> None:
    must_be_equal(one, kafka_broker.bootstrap_servers)


# -- a driver that is wrong --------------------------------------------------------------------------------------------


@scenario(partitions=2, topics={"out": 3})
def usual(end: BackEnd) -> None:
    """What the broken drivers below are compared with."""
    end.run(telling(end))
    feed(end, *NAMES)
    headers = [("__grt__", b"Added")]
    end.send_transaction((0, b"x", b'{"name": "x"}', [*headers]), (0, b"y", b'{"name": "y"}', [*headers]), commit=False)
    end.send(Added("z"), "z", partition=0, headers=[("twice", None), ("twice", b"")])
    end.settle()


def _aborted_is_visible(log: Log, start: int, end: int) -> Any:
    for entry in log.entries[start:end]:
        if entry.txn is not None and entry.txn.outcome is False:
            entry.txn = None
    return _COMMITTED(log, start, end)


def _no_markers(broker: Broker, log: Log, txn: Any) -> None:
    log.open.pop(txn, None)
    broker._grown(log)


def _other_partitions(broker: Broker, topic: str, key: bytes | None) -> int:
    return len(key or b"") % broker.topics.get(topic, broker.partitions)


def _no_headers(broker: Broker, log: Log, entry: Any) -> None:
    entry.headers = entry.headers and entry.headers[:1]
    _WRITE(broker, log, entry)


_COMMITTED, _WRITE = Log.committed, Broker._write

BROKEN: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "aborted records are visible": (Log, "committed", _aborted_is_visible),
    "transactions leave no markers": (Broker, "_mark", _no_markers),
    "keys go elsewhere": (Broker, "partition_of", _other_partitions),
    "headers are lost": (Broker, "_write", _no_headers),
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_a_driver_that_is_wrong_is_found_out(
    kafka_broker: BrokerAddress, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    assert not compare(usual, kafka_broker.bootstrap_servers)
    monkeypatch.setattr(*BROKEN[wrong])
    assert compare(usual, kafka_broker.bootstrap_servers)
