"""Global change logs over a topic in memory: what ends them, and what does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    ErrorResponse,
    EventSourceConfig,
    GlobalChangeLog,
    IncomingRecord,
    Retry,
    SourceState,
)
from streams.errors import (
    BrokerUnavailable,
    ConfigError,
    DecodeError,
    OffsetError,
    RecordError,
    Stopped,
    StoreError,
    StreamsError,
    TopicError,
)
from streams.runtime.reading import log_reader
from tests.unit.global_log_kit import Changes, Heard, MemoryTopic, caught_up, log_over, memory_topic
from tests.unit.waiting import PATIENCE, until


@pytest.fixture
def topic() -> Iterator[MemoryTopic]:
    yield from memory_topic()


async def test_a_receiver_that_raises_ends_it_everywhere(topic: MemoryTopic) -> None:
    topic.put(b"good", b"")
    first = Heard()
    log = log_over(topic)
    table = log.table(key=str, value=bytes)
    log.add_receiver(first)
    log.add_receiver(Heard(refuse=b"bad"))

    async def body() -> None:
        async with log:
            await caught_up(log)
            assert table.get("good") == b""
            topic.put(b"bad", b"", 1)
            await asyncio.Event().wait()  # it is cancelled

    with pytest.raises(RecordError, match=r"rates\[1\]@0 can not be received by Heard: KeyError: 'mine'") as caught:
        await body()
    assert isinstance(caught.value.__cause__, KeyError)
    for again in (log.wait_stopped(), log.wait_caught_up(1)):
        with pytest.raises(RecordError, match=r"rates\[1\]@0"):
            await again
    assert first.keys == [b"good", b"bad"]
    assert log.state is SourceState.FAILED
    for read in (lambda: table.get("good"), lambda: len(table.of_partition(1)), lambda: table.of_partition(7)):
        with pytest.raises(StoreError, match=r"not kept up to date any more: rates\[1\]@0"):
            read()


@pytest.mark.parametrize(("own", "raised"), [(ZeroDivisionError, ZeroDivisionError), (None, RecordError)])
async def test_the_bodys_own_error_comes_before_a_failure_that_is_known(
    topic: MemoryTopic, own: type[Exception] | None, raised: type[Exception]
) -> None:
    async def body() -> None:
        async with log_over(topic, Heard(refuse=b"bad")) as log:
            topic.put(b"bad", b"")
            with contextlib.suppress(RecordError):
                await log.wait_stopped()
            if own is not None:
                raise own

    with pytest.raises(raised):
        await body()


async def test_a_thread_that_is_told_to_exit_is_a_failure_and_no_silence(topic: MemoryTopic) -> None:
    topic.put(b"k", b"")

    def leave(_record: IncomingRecord) -> None:
        raise SystemExit(3)

    with pytest.raises(RecordError, match="SystemExit"):
        async with log_over(topic, leave) as log:
            await log.wait_caught_up(PATIENCE)


async def test_skipping_leaves_the_others_their_record(topic: MemoryTopic, caplog: pytest.LogCaptureFixture) -> None:
    log, picky, heard = log_over(topic, on_error=SKIP), Heard(refuse=b"bad"), Heard()
    table = log.table(key=str, value=float)
    log.add_receiver(picky)
    log.add_receiver(heard)
    topic.put(b"EUR", b"1.5")
    topic.put(b"bad", b"1.0")
    topic.put(b"EUR", b"{")  # no number: the table keeps what it has
    topic.put(b"\xff", b"1.0")  # no text
    topic.put(None, b"1.0")
    topic.put(b"last", b"2.0")
    async with log:
        await caught_up(log)
        assert dict(table.items()) == {"EUR": 1.5, "bad": 1.0, "last": 2.0}
        assert picky.keys == [b"EUR", b"EUR", b"\xff", b"last"]
        assert heard.keys == [b"EUR", b"bad", b"EUR", b"\xff", b"last"]
        assert log.statistics().partitions[0].skipped == 4
    for offset, who in ((1, "Heard"), (2, "the table of rates"), (3, "the table of rates"), (4, "a change")):
        assert f"rates[0]@{offset} can not be received by {who}" in caplog.text


async def test_what_can_not_be_decoded_stops_it_by_default(topic: MemoryTopic) -> None:
    topic.put(b"EUR", b"{")
    log = log_over(topic)
    log.table(key=str, value=float)
    with pytest.raises(DecodeError, match=r"rates\[0\]@0 .* not a float"):
        async with log:
            await log.wait_caught_up(PATIENCE)


async def test_retries_come_first_but_not_for_bytes(topic: MemoryTopic) -> None:
    policy = Retry(attempts=3, backoff_seconds=0.001, then=ErrorResponse.CONTINUE)
    tries = {b"twice": 0, b"never": 0, b"bytes": 0}

    def receive(record: IncomingRecord) -> None:
        assert record.key is not None
        tries[record.key] += 1
        if record.key == b"bytes":
            raise DecodeError("no")
        if record.key == b"never" or tries[record.key] < 3:
            raise OSError("not now")

    for key in tries:
        topic.put(key, b"")
    async with log_over(topic, receive, on_error=policy) as log:
        await caught_up(log)
        assert tries == {b"twice": 3, b"never": 3, b"bytes": 1}
        assert log.statistics().partitions[0].skipped == 2


async def test_stop_does_not_wait_for_a_retry(topic: MemoryTopic) -> None:
    policy = Retry(attempts=2, backoff_seconds=3600, max_backoff_seconds=3600)
    topic.put(b"k", b"")
    receiver = Heard(refuse=b"k")
    async with log_over(topic, receiver, on_error=policy) as log:
        await until(lambda: receiver.threads)
    assert log.state is SourceState.STOPPED


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (b"stop", "@1 can not"),
        (b"raise", "on_error failed: ValueError: callback"),
        (b"cancel", "on_error failed: CancelledError"),
    ],
)
async def test_a_callback_decides(topic: MemoryTopic, last: bytes, expected: str) -> None:
    seen: list[tuple[int, str]] = []

    def decide(record: IncomingRecord, error: RecordError) -> ErrorResponse:
        seen.append((record.offset, str(error)))
        if record.value == b"raise":
            raise ValueError("callback")
        if record.value == b"cancel":
            raise asyncio.CancelledError
        return ErrorResponse.CONTINUE if record.value == b"skip" else ErrorResponse.FAIL_CONSUMER

    topic.put(b"bad", b"skip")
    topic.put(b"bad", last)
    with pytest.raises(RecordError, match=expected):
        async with log_over(topic, Heard(refuse=b"bad"), on_error=decide) as log:
            await log.wait_caught_up(PATIENCE)
    assert [offset for offset, _ in seen] == [0, 1]
    assert "rates[0]@0" in seen[0][1]


def test_settings_that_can_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)
    with pytest.raises(ConfigError, match="KES_BOOTSTRAP_SERVERS"):
        GlobalChangeLog("t")
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", "h:1")
    assert "h:1" in repr(GlobalChangeLog("t"))
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("dead_letter", {"on_error": DEAD_LETTER}),
        ("on_error is 'skip'", {"on_error": "skip"}),
        ("topic_timeout_seconds", {"topic_timeout_seconds": -1}),
        ("isolation.level", {"client_settings": {"isolation.level": "read_uncommitted"}}),
        ("topic", {"topic": ""}),
    ]
    for text, settings in wrong:
        with pytest.raises(ConfigError, match=text):
            GlobalChangeLog(**{"topic": "t", **settings})
    with pytest.raises(ConfigError, match="order"):
        GlobalChangeLog("t").table(key=float, value=int, ordered=True)


async def test_secrets_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    secret = "hunter" + "2"
    config = EventSourceConfig(
        group_id="g",
        topic="t",
        num_partitions=1,
        bootstrap_servers="127.0.0.1:1",
        client_settings={"sasl.password": secret, "security.protocol": secret},
    )
    log = GlobalChangeLog.of(config)
    assert log.topic == config.changelog
    log.table(key=str, value=int)
    with pytest.raises(ConfigError, match=r"security\.protocol") as caught:
        await log.start()
    assert secret not in repr(log) + repr(vars(log)) + repr(log._reader._connections)
    assert "sasl.password" not in str(caught.value)
    assert f'"sasl.password": "{secret}"' not in caplog.text


# -- the topic --------------------------------------------------------------------------------------------------------


async def test_one_that_is_not_there_is_waited_for_and_then_told(topic: MemoryTopic) -> None:
    topic.exists = False
    log = log_over(topic, Heard(), topic_timeout_seconds=0.01)
    with pytest.raises(TopicError, match="topic rates does not exist at memory:9092"):
        await log.start()
    assert log.state is SourceState.CREATED
    patient = log_over(topic, Heard(), topic_timeout_seconds=PATIENCE)
    starting = asyncio.create_task(patient.start())
    await until(lambda: patient.state is SourceState.STARTING)
    topic.exists = True
    await starting
    await patient.stop()


async def test_stop_while_it_starts(topic: MemoryTopic) -> None:
    topic.exists = False
    store = Changes()
    log = log_over(topic, store, topic_timeout_seconds=3600)
    starting = asyncio.create_task(log.start())
    await until(lambda: log.state is SourceState.STARTING)
    await log.stop()
    with pytest.raises(Stopped):
        await starting
    assert (log.state, store.ends) == (SourceState.STOPPED, 1)


async def test_nobody_answers(topic: MemoryTopic) -> None:
    topic.answers = False
    with pytest.raises(BrokerUnavailable):
        await log_over(topic, Heard(), topic_timeout_seconds=0.01).start()


@pytest.mark.parametrize("noticed_by", ["watching", "waiting", "reading"])
@pytest.mark.parametrize("what", ["recreated", "deleted"])
async def test_one_that_is_not_the_same_any_more(
    topic: MemoryTopic, what: str, noticed_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if noticed_by == "watching":
        monkeypatch.setattr(log_reader, "WATCH_SECONDS", 0.01)
    topic.put(b"k", b"")
    log = log_over(topic)
    table = log.table(key=str, value=bytes)
    expected, text = (OffsetError, "id-1, and is id-2") if what == "recreated" else (TopicError, "any more")

    async def body() -> None:
        async with log:
            await caught_up(log)
            topic.exists, topic.identity = what == "recreated", "id-2"
            if noticed_by == "waiting":
                await log.wait_caught_up(PATIENCE)
            elif noticed_by == "reading":
                topic.failures[0] = [TopicError("rates[0] does not exist")]
            await log.wait_stopped()

    with pytest.raises(expected, match=text):
        await body()
    with pytest.raises(StoreError, match="not kept up to date"):
        table.get("k")


async def test_what_a_broker_does_not_know_yet_is_tried_again(
    topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "RETRY_SECONDS", 0.01)
    heard = Heard()
    topic.put(b"a", b"")
    async with log_over(topic, heard) as log:
        await caught_up(log)
        topic.failures[0] = [TopicError("not known"), TopicError("not known")]
        await until(lambda: not topic.failures[0])
        topic.put(b"b", b"")
        await caught_up(log)
        assert heard.keys == [b"a", b"b"]
        assert (0, 1) in topic.followed
        topic.unknown = 1
        await caught_up(log)  # one answer that it is not there is not believed
        assert topic.unknown == 0


async def test_what_may_not_be_read_is_told_in_the_end(topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "RETRY_SECONDS", 0.01)
    topic.failures[1] = [TopicError("may not be read") for _ in range(1000)]
    with pytest.raises(TopicError, match="may not be read"):
        async with log_over(topic, Heard(), topic_timeout_seconds=0.05) as log:
            await log.wait_caught_up(PATIENCE)
    assert 900 < len(topic.failures[1]) < 999


@pytest.mark.parametrize(
    ("failure", "raised", "text"),
    [
        (OffsetError("rates[1]: offset 7 is not in the log"), OffsetError, "offset 7"),
        (RuntimeError("broken"), StreamsError, r"rates can not go on: RuntimeError\('broken'\)"),
    ],
)
async def test_other_failures_of_the_reading_are_told_at_once(
    topic: MemoryTopic, failure: Exception, raised: type[Exception], text: str
) -> None:
    topic.failures[1] = [failure]
    with pytest.raises(raised, match=text):
        async with log_over(topic, Heard()) as log:
            await log.wait_stopped()


@pytest.mark.parametrize("noticed_by", ["watching", "waiting"])
async def test_new_partitions_are_read_too(
    topic: MemoryTopic, noticed_by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if noticed_by == "watching":
        monkeypatch.setattr(log_reader, "WATCH_SECONDS", 0.01)
    topic.policy = "delete"
    log = log_over(topic)
    table = log.table(key=str, value=bytes)
    async with log:
        await caught_up(log)
        topic.logs.append(type(topic.logs[0])())
        topic.put(b"k", b"v", 2)
        if noticed_by == "watching":
            await until(lambda: len(table) == 1)
        else:
            await caught_up(log)
        assert table.get("k") == b"v"
        assert "rates has 3 partitions now, 2 before" in caplog.text
        await until(lambda: "cleanup.policy=delete" in caplog.text)  # one that is not compacted is warned of


# -- stopping ---------------------------------------------------------------------------------------------------------


async def test_a_receiver_that_does_not_come_back_is_left_and_not_ended(
    topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_reader, "STOP_SECONDS", 0.05)
    store, slow = Changes(), Heard(hold=b"k")
    topic.put(b"k", b"")
    log = log_over(topic, store, slow)
    await log.start()
    await until(slow.entered.is_set)
    await log.stop()
    assert "left to itself" in caplog.text
    assert store.ends == 0  # never while a receiver may be called
    slow.go_on.set()


async def test_nothing_is_handed_over_after_stop(topic: MemoryTopic) -> None:
    slow = Heard(hold=b"0")
    for n in range(100):
        topic.put(b"%d" % n, b"")
    log = log_over(topic, slow)
    await log.start()
    await until(slow.entered.is_set)
    stopping = asyncio.create_task(log.stop())
    await until(lambda: log.state is SourceState.STOPPING)
    slow.go_on.set()
    await stopping
    assert slow.keys == [b"0"]


@pytest.mark.parametrize("by", ["task", "scope"])
async def test_cancelled_in_the_body_it_still_ends_properly(
    topic: MemoryTopic, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "WATCH_SECONDS", 3600)
    store, scope = Changes(), anyio.CancelScope()
    log = log_over(topic, store)

    async def body() -> None:
        with scope:
            async with log:
                await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await until(lambda: log.state is SourceState.RUNNING)
    if by == "task":
        task.cancel()
    else:
        scope.cancel()
    await asyncio.wait([task])
    assert task.cancelled() == (by == "task")
    assert (log.state, store.ends, topic.open_consumers) == (SourceState.STOPPED, 1, 0)
    await until(lambda: len(asyncio.all_tasks()) == 1, "its tasks are over, too")


async def test_an_end_of_a_receiver_that_raises_is_logged(topic: MemoryTopic, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Changes):
        def revoked(self) -> None:
            raise KeyError("mine")

    store = Changes()
    async with log_over(topic, Broken(), store):
        pass
    assert store.ends == 1
    assert "the end of Broken failed" in caplog.text
