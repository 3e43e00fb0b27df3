"""What the clients do while nothing answers, and afterwards: a broker of its own is killed, and comes back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from streams.broker import KafkaBroker
from streams.errors import BrokerUnavailable
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.fetch_session import FOLLOWING
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.records import IncomingRecord
from streams.runtime.reading.log_follower import Tail
from tests.broker.client_kit import PATIENCE, Writer, create, rows, writing
from tests.unit.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(480)]

SOON = 15.0
"""Far below the time limits of the clients' own (a minute and more), and more than a busy machine stands still for."""


@pytest.fixture
def settings(broker: KafkaBroker) -> ClientSettings:
    return ClientSettings(broker.bootstrap_servers)


def test_killed_and_restarted(
    broker: KafkaBroker, settings: ClientSettings, admin: TopicAdmin, caplog: pytest.LogCaptureFixture, request: Any
) -> None:
    caplog.set_level(logging.INFO, logger="streams.kafka.connection")
    create(admin, "log", 2)
    heard: list[tuple[int, int, list[bytes | None], int, int]] = []
    failed: list[Exception] = []

    def receive(partition: int, epoch: int, records: list[IncomingRecord], position: int, end: int) -> None:
        heard.append((partition, epoch, [record.value for record in records], position, end))

    def wait_for(*calls: tuple[object, ...]) -> None:
        wait_until(lambda: all(any(each[: len(call)] == call for each in heard) for call in calls), heard, 90.0)

    tail = Tail(lambda: LogFetcher(settings, "log", FOLLOWING))
    request.addfinalizer(tail.close)
    tail.start(receive, lambda _partition, _epoch, error: failed.append(error))
    tail.add(0, 0, 7)
    tail.add(1, -1, 8)
    wait_for((0, 7, [], 0, 0), (1, 8, [], 0, 0))
    writer = Writer(settings, "log")
    writer.commit(*rows(0, "before"))
    wait_for((0, 7, [b"before"]))
    tail.remove([1])
    writer.begin(*rows(0, "unsettled"))
    broker.kill()

    reader = PartitionReader(settings)
    calls: list[Callable[[], object]] = [
        lambda: admin.watermarks("log", timeout_seconds=1),
        lambda: read(reader, 5, seconds=1.0),
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable, match=broker.bootstrap_servers):
            call()
        assert time.monotonic() - began < SOON
    wait_until(lambda: "can not be reached" in caplog.text, heard, 90.0)

    broker.restart()
    with writing(settings, "log") as successor:
        successor.commit(*rows(1, "nobody's"))
        successor.commit(*rows(0, "after"))
    # Unsettled when the broker died: the successor's init has decided it, one way for everybody.
    found = read(reader, admin.watermarks("log", timeout_seconds=PATIENCE)[0].end)
    assert found in ([b"before", b"after"], [b"before", b"unsettled", b"after"])
    wait_until(lambda: [value for call in heard if call[:2] == (0, 7) for value in call[2]] == found, heard, 90.0)
    told = [text for record in caplog.records if (text := record.getMessage()).startswith("tail log")]
    assert ["answers again" in text for text in told] == [False, True], told  # once, not once per attempt
    assert not [call for call in heard if call[0] == 1 and call[2]], "it was removed"
    assert not failed
    tail.close()
    reader.close()
    wait_until(lambda: not any(thread.name == "kes-tail" for thread in threading.enumerate()))


def read(reader: PartitionReader, end: int, seconds: float = PATIENCE) -> list[bytes | None]:
    return [record.value for record in reader.read_all("log", {0: (0, end)}, stalled_after_seconds=seconds)[0]]
