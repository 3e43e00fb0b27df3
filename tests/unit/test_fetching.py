"""Reading up to an end by Fetch requests of our own, from brokers that answer as a script says."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any
from uuid import UUID

import pytest

from streams.errors import BrokerUnavailable, LogDamaged, OffsetError, Stopped, StreamsError, TopicError, TopicReplaced
from streams.kafka.reading import fetch_line, fetching
from streams.kafka.reading.fetch_session import LOOKING_UP
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.connection import CONNECT_SECONDS
from streams.records import IncomingRecord
from tests.unit.fetch_kit import GARBAGE, GONE, NO_ANSWER, Log, LogBrokers, Row, Stored, encoded, framed, random_log
from tests.unit.waiting import said_by, says_at_last

PATIENCE = 20.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_line, "FIRST_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(fetching, "UNKNOWN_SECONDS", 0.3)


def small(monkeypatch: pytest.MonkeyPatch, partition: int = 1, answer: int = 8 << 20) -> None:
    """Let a fetch bring a batch at a time, or as many bytes."""
    kind = LOOKING_UP._replace(near_bytes=partition, far_bytes=partition, answer_bytes=answer)
    monkeypatch.setattr("streams.kafka.reading.reader.LOOKING_UP", kind)


def log_of(*batches: int, start: int = 0, size: int = 1) -> Log:
    """A log of batches with so many records; their values are their offsets."""
    log = Log(start)
    for count in batches:
        log.append([Row(value=b"%d" % offset * size) for offset in range(log.end, log.end + count)])
    return log


@pytest.fixture
def brokers(request: pytest.FixtureRequest) -> Iterator[LogBrokers]:
    logs, count = getattr(request, "param", ({0: (3, 4, 5)}, 1))
    made = {number: log_of(*batches) for number, batches in logs.items()}
    with LogBrokers(made, brokers=count).serving() as found:
        yield found


def reading(brokers: LogBrokers) -> AbstractContextManager[PartitionReader]:
    return closing(PartitionReader(ClientSettings(brokers.bootstrap_servers)))


two_brokers = pytest.mark.parametrize("brokers", [({0: (3, 4, 5), 1: (2, 2), 2: (9,)}, 2)], indirect=True)


def read(
    brokers: LogBrokers,
    ranges: dict[int, tuple[int, int]],
    *,
    seconds: float = PATIENCE,
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[int, list[int]]:
    """Partition -> the offsets that were read."""
    found: dict[int, list[int]] = {}

    def receive(partition: int, records: list[IncomingRecord]) -> None:
        assert records
        assert all(int(record.value or b"-1") == record.offset for record in records)
        found.setdefault(partition, []).extend(record.offset for record in records)

    with reading(brokers) as reader:
        reader.read("t", ranges, receive, stalled_after_seconds=seconds, cancelled=cancelled)
    return found


def fails_with(error: type[StreamsError], brokers: LogBrokers, ranges: dict[int, tuple[int, int]], **more: Any) -> str:
    with pytest.raises(error) as caught:
        read(brokers, ranges, **more)
    return str(caught.value)


def never_reads(brokers: LogBrokers, said: str) -> None:
    says_at_last(BrokerUnavailable, said, lambda seconds: read(brokers, {0: (0, 12)}, seconds=seconds))


@two_brokers
def test_each_broker_is_read_by_one_connection_up_to_the_ends(brokers: LogBrokers) -> None:
    assert read(brokers, {0: (1, 12), 1: (0, 4), 2: (3, 5)}) == {0: [*range(1, 12)], 1: [0, 1, 2, 3], 2: [3, 4]}
    assert brokers.fetched() == [(0, 0, 1), (0, 2, 3), (1, 1, 0)] or brokers.fetched()[0][0] == 1
    names = [(number, name) for number, name, _ in brokers.requests]
    assert sum(name == "ApiVersions" for _, name in names) == 3, "one for questions, one for each broker"


def test_random_logs_in_small_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 32)
    print(f"SEED={seed}")
    rng = random.Random(seed)
    for _ in range(15):
        small(monkeypatch, rng.choice([1, 500, 1 << 20]), rng.choice([1, 3000, 8 << 20]))
        logs = {number: random_log(rng, rng.choice([1, 10, 40])) for number in range(3)}
        for log in logs.values():
            for producer in [*log.open]:
                log.mark(producer, commit=rng.random() < 0.5)
            log.append([Row()])  # no hole at the end
        spans = {number: (rng.randint(log.start, log.stable), log.stable) for number, log in logs.items()}
        with LogBrokers(logs, brokers=rng.choice([1, 2])).serving() as brokers, reading(brokers) as reader:
            found = reader.read_all("t", spans, stalled_after_seconds=PATIENCE)
        for number, (start, _) in spans.items():
            expected = [(offset, row.key, row.value, row.timestamp_ms) for offset, row in logs[number].expected(start)]
            assert [(one.offset, one.key, one.value, one.timestamp_ms) for one in found[number]] == expected


def test_the_next_fetch_is_on_its_way_before_an_answer_is_decoded(
    brokers: LogBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    seen: list[int] = []

    def slow() -> bool:
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline and len(brokers.fetched()) < 3:
            time.sleep(0.01)
        seen.append(len(brokers.fetched()))
        return False

    assert read(brokers, {0: (0, 12)}, cancelled=slow) == {0: [*range(12)]}
    assert len(brokers.fetched()) == 3, "none behind the end"


def test_a_record_larger_than_the_fetch(brokers: LogBrokers) -> None:
    brokers.logs[0] = log = log_of(1)
    log.append([Row(value=b"1", key=b"x" * 20_000_000)])
    log.append([Row(value=b"2")])
    assert read(brokers, {0: (0, 3)}) == {0: [0, 1, 2]}


def test_a_first_batch_that_is_cut_off_is_fetched_with_more_bytes(brokers: LogBrokers) -> None:
    def cut(answer: Any) -> None:
        data = answer.responses[0].partitions[0]
        data.records = data.records[:70]

    brokers.answer("Fetch", cut, cut)
    assert read(brokers, {0: (0, 12)}) == {0: [*range(12)]}
    sizes = [
        request.topics[0].partitions[0].partition_max_bytes for _, name, request in brokers.requests if name == "Fetch"
    ]
    assert sizes[:3] == [1 << 20, 2 << 20, 4 << 20]
    brokers.answer("Fetch", *[cut] * 20)
    assert "t[0]@0: the broker cuts off" in fails_with(LogDamaged, brokers, {0: (0, 12)})


@two_brokers
def test_a_leader_that_moves_is_followed(brokers: LogBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)

    def moves(answer: Any) -> None:
        brokers.leaders[0], brokers.epochs[0] = 1, 3

    brokers.answer("Fetch", moves)
    assert read(brokers, {0: (0, 12)}) == {0: [*range(12)]}
    assert {broker for broker, _, _ in brokers.fetched()} == {0, 1}
    last = [request for _, name, request in brokers.requests if name == "Fetch"][-1].topics[0].partitions[0]
    assert (last.current_leader_epoch, last.last_fetched_epoch) == (3, 0)


@two_brokers
def test_a_leader_that_dies_or_is_frozen_is_replaced(brokers: LogBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    for said in (GONE, NO_ANSWER, GARBAGE):
        brokers.leaders[0] = 0
        brokers.answer("Fetch", None, said)

        def moves() -> bool:
            if not brokers.script["Fetch"]:
                brokers.leaders[0] = 1
            return False

        assert read(brokers, {0: (0, 12)}, cancelled=moves) == {0: [*range(12)]}, said


def test_a_broker_that_takes_its_time_for_an_answer_gets_more_each_time(brokers: LogBrokers) -> None:
    brokers.fetch_seconds = 0.8  # the first patience is 0.3 seconds
    assert read(brokers, {0: (0, 12)}) == {0: [*range(12)]}


@two_brokers
def test_a_broker_that_takes_connections_and_says_nothing(brokers: LogBrokers) -> None:
    brokers.answer("ApiVersions", None, NO_ANSWER)  # the first one is for questions

    def moves() -> bool:
        if not brokers.script["ApiVersions"]:
            brokers.leaders[0] = 1
        return False

    began = time.monotonic()
    assert read(brokers, {0: (0, 12)}, cancelled=moves) == {0: [*range(12)]}
    assert time.monotonic() - began < CONNECT_SECONDS


@pytest.mark.parametrize("code", [5, 6, 9, 74, 75, 78, 7, 56, 13, -1, 3, 100, 103])
def test_what_passes_is_tried_again(brokers: LogBrokers, code: int) -> None:
    def refuse(answer: Any) -> None:
        answer.responses[0].partitions[0].error_code = code

    brokers.answer("Fetch", refuse, refuse)
    assert read(brokers, {0: (0, 12)}) == {0: [*range(12)]}


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (1, OffsetError, r"t[0]: offset 0 is not in the log"),
        (29, TopicError, r"reading t[0]: not authorised (TOPIC_AUTHORIZATION_FAILED)"),
        (2, LogDamaged, r"t[0]@0: the broker cannot read it either"),
        (87, TopicError, r"t[0] can not be read from 127.0.0.1:"),
        (999, TopicError, r"ERR_999?"),
    ],
)
def test_what_does_not_pass_names_the_partition(
    brokers: LogBrokers, code: int, error: type[StreamsError], words: str
) -> None:
    def refuse(answer: Any) -> None:
        answer.responses[0].partitions[0].error_code = code

    brokers.answer("Fetch", refuse)
    assert words in fails_with(error, brokers, {0: (0, 12)})
    brokers.answer("Fetch", lambda answer: setattr(answer, "error_code", code))
    assert words in fails_with(error, brokers, {0: (0, 12)})


def test_a_log_trimmed_behind_the_reader_or_cut_before_it(brokers: LogBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    brokers.answer("Fetch", lambda _: setattr(brokers.logs[0], "start", 5))
    assert "t[0]: offset 3 is not in the log" in fails_with(OffsetError, brokers, {0: (0, 12)})
    brokers.logs[0] = log_of(3, 4, 5)
    brokers.answer("Fetch", lambda _: setattr(brokers.logs[0], "end", 2))
    assert "t[0]: offset 3 is not in the log" in fails_with(OffsetError, brokers, {0: (0, 12)})


def test_records_that_another_leader_does_not_have(brokers: LogBrokers) -> None:
    """An election of a replica that lagged: its log has other records under the same offsets."""

    def diverges(answer: Any) -> None:
        data = answer.responses[0].partitions[0]
        data.records, data.diverging_epoch = b"", type(data).EpochEndOffset(epoch=1, end_offset=2)

    brokers.answer("Fetch", diverges)
    assert "under leader epoch -1, which the log has up to 2 only" in fails_with(OffsetError, brokers, {0: (0, 12)})


def test_a_topic_that_is_missing_or_goes(brokers: LogBrokers) -> None:
    brokers.is_there = False
    assert "t does not exist at 127.0.0.1:" in fails_with(TopicError, brokers, {0: (0, 12)})
    brokers.is_there = True
    assert "t[7] does not exist at" in fails_with(TopicError, brokers, {7: (0, 12)})
    brokers.answer("Fetch", lambda _: setattr(brokers, "is_there", False))
    brokers.logs[0].skip(5)
    assert "t does not exist at" in fails_with(TopicError, brokers, {0: (0, 17)})


def test_a_topic_that_is_made_again_while_it_is_read(brokers: LogBrokers) -> None:
    brokers.answer("Fetch", lambda _: setattr(brokers, "topic_id", UUID(int=8)))
    brokers.logs[0].skip(5)
    told = fails_with(TopicReplaced, brokers, {0: (0, 17)})
    assert f"t was deleted and created again while it was read (id {UUID(int=7)} then, {UUID(int=8)} now)" in told
    assert read(brokers, {0: (0, 12)}) == {0: [*range(12)]}, "another reading begins with the new one"


def test_brokers_without_topic_ids(brokers: LogBrokers) -> None:
    brokers.fetch_versions = (4, 11)
    assert read(brokers, {0: (0, 12)}) == {0: [*range(12)]}


def test_a_broker_that_is_too_old_is_named(brokers: LogBrokers) -> None:
    brokers.fetch_versions = (0, 3)
    never_reads(brokers, "the broker does not take FetchRequest")


def test_a_leader_epoch_that_goes_back_is_not_believed(brokers: LogBrokers) -> None:
    brokers.epochs[0] = 5

    def goes_back(answer: Any) -> None:
        answer.responses[0].partitions[0].error_code = 74
        brokers.epochs[0] = 3

    brokers.answer("Fetch", goes_back)
    never_reads(brokers, "the leader epoch went back from 5 to 3")


def test_throttling_is_kept_to_but_not_for_hours(brokers: LogBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_line, "MOST_THROTTLE_SECONDS", 0.2)

    def throttle(answer: Any) -> None:
        answer.throttle_time_ms, answer.responses = 3_600_000, []

    brokers.answer("Fetch", throttle, throttle)
    began = time.monotonic()
    assert read(brokers, {0: (0, 12)}) == {0: [*range(12)]}
    assert 0.4 <= time.monotonic() - began < PATIENCE


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: answer.responses.clear(),
        lambda answer: setattr(answer.responses[0], "topic_id", UUID(int=9)),
        lambda answer: setattr(answer.responses[0].partitions[0], "partition_index", 4),
        lambda answer: answer.responses[0].partitions.append(answer.responses[0].partitions[0]),
        GARBAGE,
    ],
    ids=["nothing", "another topic", "another partition", "twice", "garbage"],
)
def test_an_answer_about_something_else_is_not_used(brokers: LogBrokers, spoil: Any) -> None:
    brokers.answer("Fetch", spoil)
    assert read(brokers, {0: (0, 12)}) == {0: [*range(12)]}
    brokers.answer("Fetch", *[spoil] * 100)
    never_reads(brokers, "the answer to Fetch cannot be used")


def test_damage_ends_the_reading_behind_what_is_good(brokers: LogBrokers) -> None:
    log = log_of(2)
    content = framed(2, encoded([Row()])[0], 1)
    log.put(Stored(2, 3, -1, False, content[:-1] + b"\7"))
    brokers.logs[0] = log
    got: list[int] = []
    damage = pytest.raises(LogDamaged, match=r"t\[0\]@2: the record batch cannot be read: its checksum is wrong")

    def receive(_partition: int, records: list[IncomingRecord]) -> None:
        got.extend(one.offset for one in records)

    with reading(brokers) as reader, damage:
        reader.read("t", {0: (0, 3)}, receive, stalled_after_seconds=PATIENCE, cancelled=lambda: False)
    assert got == [0, 1]


def test_an_open_transaction_holds_the_reading(brokers: LogBrokers) -> None:
    brokers.logs[0].append([Row(value=b"12")], producer=5)
    told = fails_with(BrokerUnavailable, brokers, {0: (0, 13)}, seconds=0.3)
    assert "t[0] at 12 of 13: no progress for 0.3 s" in told
    assert "an open transaction may hold the end" in told
    brokers.logs[0].mark(5, commit=True)
    assert read(brokers, {0: (10, 13)}) == {0: [10, 11, 12]}


def test_cancelled_and_broken_readings_leave_a_reader_that_works(brokers: LogBrokers) -> None:
    with reading(brokers) as reader:
        more: dict[str, Any] = {"stalled_after_seconds": PATIENCE}
        with pytest.raises(Stopped, match="t was cancelled"):
            reader.read("t", {0: (0, 12)}, lambda *_: None, cancelled=lambda: True, **more)

        def broken(_partition: int, _records: list[IncomingRecord]) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            reader.read("t", {0: (0, 12)}, broken, cancelled=lambda: False, **more)
        assert len(reader.read_all("t", {0: (0, 12)}, **more)[0]) == 12
        assert reader.read_all("t", {0: (5, 5)}, **more) == {0: []}


async def test_a_thread_whose_loop_runs_may_read(brokers: LogBrokers) -> None:
    assert read(brokers, {0: (0, 12)}) == {0: [*range(12)]}
    assert asyncio.get_running_loop().is_running()


def test_no_broker_at_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="streams.kafka.connection")
    silence = pytest.raises(BrokerUnavailable, match=r"nothing listens at 127\.0\.0\.1:1")
    with closing(PartitionReader(ClientSettings("127.0.0.1:1"))) as reader, silence:
        reader.read_all("t", {0: (0, 12)}, stalled_after_seconds=0.5)
    assert [line for line in said_by(caplog, "streams.kafka.connection") if line.startswith("reader t: ")] == [
        "reader t: Kafka at 127.0.0.1:1 can not be reached (nothing listens at 127.0.0.1:1: is it running? "
        "(kes broker start)), trying on"
    ]
