"""Following logs by Fetch requests of our own: their ends, partitions that come and go, sessions of brokers."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from streams.errors import OffsetError
from streams.kafka.reading import fetch_line, fetch_session
from streams.kafka.reading.fetch_session import FOLLOWING, LOG_START, FetchKind
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.settings import ClientSettings
from streams.kafka.wire import lines
from streams.records import PolledPartition
from tests.unit.fetch_kit import GARBAGE, GONE, Log, LogBrokers, Row, random_rows
from tests.unit.test_fetching import log_of

PATIENCE = 20.0


class Followed:
    """What has come so far, by partition."""

    def __init__(self, brokers: LogBrokers, kind: FetchKind = FOLLOWING) -> None:
        self.log = LogFetcher(ClientSettings(brokers.bootstrap_servers), "t", kind)
        self.offsets: dict[int, list[int]] = {}
        self.news: list[tuple[int, PolledPartition]] = []
        self.failures: dict[int, Exception] = {}

    def poll(self, seconds: float = 0.05, limit: int = 500) -> None:
        for number, progress in self.log.poll_batch(seconds, limit).items():
            assert len(progress.records) <= limit
            self.news.append((number, progress))
            self.offsets.setdefault(number, []).extend(record.offset for record in progress.records)
        self.failures.update(self.log.take_failures())

    def until(self, condition: Any, limit: int = 500) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, vars(self)
            self.poll(limit=limit)

    def at_end(self, number: int) -> bool:
        """Whether the last news of a partition say that nothing is left."""
        last = [progress for one, progress in self.news if one == number]
        return bool(last) and last[-1].at_end


@pytest.fixture
def brokers() -> Iterator[LogBrokers]:
    logs = {0: log_of(3, 4), 1: log_of(), 2: log_of(5, start=1000), 3: log_of(1)}
    with LogBrokers(logs, brokers=2).serving() as found:
        yield found


@pytest.fixture
def followed(brokers: LogBrokers) -> Iterator[Followed]:
    followed = Followed(brokers)
    with closing(followed.log):
        yield followed


def test_ends_are_reported_once_with_records_or_without(brokers: LogBrokers, followed: Followed) -> None:
    followed.log.add_all({0: 2, 1: LOG_START, 2: LOG_START, 3: 1})
    followed.until(lambda: all(followed.at_end(number) for number in range(4)))
    assert followed.offsets == {0: [2, 3, 4, 5, 6], 1: [], 2: [*range(1000, 1005)], 3: []}
    positions = {number: (progress.position, progress.end) for number, progress in followed.news}
    assert positions == {0: (7, 7), 1: (0, 0), 2: (1005, 1005), 3: (1, 1)}
    before = len(followed.news)
    for _ in range(5):
        followed.poll()
    assert len(followed.news) == before, "nothing new"
    brokers.logs[1].append([Row(), Row()])
    brokers.logs[3].append([Row()], producer=7)
    followed.until(lambda: followed.offsets[1] == [0, 1])
    brokers.logs[3].mark(7, commit=False)
    followed.until(lambda: followed.news[-1][1].position == 3)
    assert followed.news[-1] == (3, PolledPartition([], 3, 3, True))


def test_an_open_transaction_is_an_end_below_the_end(brokers: LogBrokers, followed: Followed) -> None:
    brokers.logs[0].append([Row()], producer=7)
    followed.log.add(0, 5)
    followed.until(lambda: followed.at_end(0))
    assert followed.news[-1] == (0, PolledPartition(followed.news[-1][1].records, 7, 8, True))


def test_a_session_has_only_what_is_new(brokers: LogBrokers, followed: Followed) -> None:
    followed.log.add_all(dict.fromkeys(range(4), LOG_START))
    followed.until(lambda: all(followed.at_end(number) for number in range(4)))
    brokers.logs[0].append([Row()])
    followed.until(lambda: followed.offsets[0][-1:] == [7])
    followed.log.remove([2])
    brokers.logs[0].append([Row()])
    followed.until(lambda: followed.offsets[0][-1:] == [8])
    followed.poll()
    requests = [request for number, name, request in brokers.requests if name == "Fetch" and number == 0]
    last = requests[-1]
    assert last.session_epoch > 0
    assert sum(len(topic.partitions) for topic in last.topics) <= 1, "of two"
    assert any(request.forgotten_topics_data for request in requests)
    assert [*brokers.sessions[last.session_id]] == [0]


@pytest.mark.parametrize("keeps", [True, False], ids=["sessions", "no room for sessions"])
def test_partitions_that_come_go_and_fail_at_random(
    brokers: LogBrokers, followed: Followed, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 32)
    print(f"SEED={seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(fetch_line, "FIRST_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(lines, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(fetch_session, "FAR_OFFSETS", 5)
    brokers.keeps_sessions = keeps
    starts: dict[int, int] = {}

    def forget(_: Any) -> None:
        brokers.sessions.clear()

    for _ in range(150):
        number = rng.randrange(4)
        match rng.randrange(7):
            case 0 if number not in starts:
                log = brokers.logs[number]
                starts[number] = rng.choice([LOG_START, rng.randint(log.start, log.end)])
                followed.offsets[number] = []
                followed.log.add(number, starts[number])
            case 1 if number in starts and rng.random() < 0.3:
                followed.log.remove([number])
                del starts[number]
            case 2 | 3:
                brokers.logs[number].append(random_rows(rng, rng.choice([1, 4])))
            case 4 if rng.random() < 0.3:
                brokers.answer("Fetch", rng.choice([GONE, GARBAGE, forget, None]))
            case 5 if rng.random() < 0.3:
                brokers.leaders[number] = 1 - brokers.leaders[number]
                brokers.epochs[number] += 1
            case _:
                followed.poll(rng.choice([0.0, 0.01]), rng.choice([1, 3, 500]))
    brokers.script.clear()
    for number, log in brokers.logs.items():
        log.append([Row()])
        if number in starts:
            followed.until(lambda: followed.offsets[number][-1:] == [brokers.logs[number].end - 1])  # noqa: B023
    assert not followed.failures
    for number, start in starts.items():
        log = brokers.logs[number]
        first = log.start if start == LOG_START else start
        assert followed.offsets[number] == [*range(first, log.end)]


def test_fetches_that_bring_nothing_are_held_for_longer(brokers: LogBrokers, followed: Followed) -> None:
    followed.log.add(0, 7)
    until = time.monotonic() + 1.5
    followed.until(lambda: time.monotonic() > until)
    held = [request.max_wait_ms for number, name, request in brokers.requests if name == "Fetch"]
    assert held[-1] == FOLLOWING.longest_wait_ms
    assert len(held) < 12, "20 ms, and twice as long each time"


def test_what_is_added_does_not_wait_behind_a_fetch_that_is_held(brokers: LogBrokers) -> None:
    followed = Followed(brokers, FOLLOWING._replace(wait_ms=60_000, longest_wait_ms=60_000))
    with closing(followed.log):
        followed.log.add(0, 7)
        followed.until(brokers.fetched)
        for offset in (1000, 1001, 1002):
            followed.log.add(2, offset)
            followed.offsets[2] = []
            followed.until(lambda: followed.offsets[2][-1:] == [1004])
            followed.log.remove([2])


def test_a_failure_ends_its_partition_alone(brokers: LogBrokers, followed: Followed) -> None:
    followed.log.add_all({0: 99, 2: 1003})
    followed.until(lambda: followed.failures)
    assert isinstance(followed.failures[0], OffsetError)
    followed.until(lambda: followed.offsets.get(2) == [1003, 1004])
    followed.log.add(0, 6)
    followed.until(lambda: followed.offsets.get(0) == [6])
    with pytest.raises(ValueError, match=r"t\[0\] is read already"):
        followed.log.add(0, 6)


def test_one_partition_does_not_wait_behind_the_backlog_of_another(brokers: LogBrokers, followed: Followed) -> None:
    brokers.logs[0] = Log()
    for _ in range(20):
        brokers.logs[0].append([Row()] * 100)
    followed.log.add_all({0: 0, 2: 1000})
    followed.until(lambda: 2 in followed.offsets and followed.offsets[2], limit=100)
    assert len(followed.offsets.get(0, [])) <= 200
    followed.until(lambda: len(followed.offsets[0]) == 2000, limit=100)
