"""Global change logs over a topic in memory: what ends them, and what does not."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    ErrorPolicy,
    ErrorResponse,
    EventSourceConfig,
    GlobalChangeLog,
    IncomingRecord,
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
    TopicError,
)
from streams.runtime.reading import log_reader
from tests.unit.global_log_kit import PATIENCE, Changes, Heard, MemoryTopic, log_over, threads_end, until

pytestmark = pytest.mark.asyncio


@pytest.fixture
def topic() -> MemoryTopic:
    return MemoryTopic()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield from threads_end()


class TestErrors:
    async def test_a_receiver_that_raises_ends_it_everywhere(self, topic: MemoryTopic) -> None:
        topic.put(b"good", b"")
        log, first, heard = log_over(topic), Heard(), Heard(refuse=b"bad")
        table = log.table(key=str, value=bytes)
        log.add_receiver(first)
        log.add_receiver(heard)

        async def body() -> None:
            async with log:
                assert await log.wait_caught_up(PATIENCE)
                assert table.get("good") == b""
                topic.put(b"bad", b"", 1)
                await asyncio.Event().wait()  # it is cancelled

        with pytest.raises(RecordError, match=r"rates\[1\]@0 can not be received by Heard: KeyError: 'mine'") as caught:
            await body()
        assert isinstance(caught.value.__cause__, KeyError)
        for again in (log.wait_stopped(), log.wait_caught_up(1)):
            with pytest.raises(RecordError, match=r"rates\[1\]@0"):
                await again
        topic.put(b"never", b"", 0)
        assert first.keys == [b"good", b"bad"]
        assert log.state is SourceState.FAILED
        with pytest.raises(StoreError, match=r"not kept up to date any more: rates\[1\]@0"):
            table.get("good")
        with pytest.raises(StoreError, match="not kept up to date"):
            len(table.of_partition(1))
        with pytest.raises(StoreError, match="not kept up to date"):
            table.of_partition(7)

    async def test_the_bodys_own_error_is_the_one_that_is_raised(self, topic: MemoryTopic) -> None:
        log = log_over(topic)
        log.add_receiver(Heard(refuse=b"bad"))

        async def body() -> None:
            async with log:
                topic.put(b"bad", b"")
                with contextlib.suppress(RecordError):
                    await log.wait_stopped()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await body()

    async def test_a_failure_nobody_waited_for_is_raised_at_the_end_of_the_body(self, topic: MemoryTopic) -> None:
        log = log_over(topic)
        log.add_receiver(Heard(refuse=b"bad"))

        async def body() -> None:
            async with log:
                topic.put(b"bad", b"")
                with contextlib.suppress(RecordError):
                    await log.wait_stopped()

        with pytest.raises(RecordError, match="@0"):
            await body()

    async def test_a_thread_that_is_told_to_exit_is_a_failure_and_no_silence(self, topic: MemoryTopic) -> None:
        topic.put(b"k", b"")
        log = log_over(topic)

        @log.add_receiver
        def leave(_record: IncomingRecord) -> None:
            raise SystemExit(3)

        with pytest.raises(RecordError, match="SystemExit"):
            async with log:
                await log.wait_caught_up(PATIENCE)

    async def test_skipping_leaves_the_others_their_record(
        self, topic: MemoryTopic, caplog: pytest.LogCaptureFixture
    ) -> None:
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
            assert await log.wait_caught_up(PATIENCE)
            assert dict(table.items()) == {"EUR": 1.5, "bad": 1.0, "last": 2.0}
            assert picky.keys == [b"EUR", b"EUR", b"\xff", b"last"]
            assert heard.keys == [b"EUR", b"bad", b"EUR", b"\xff", b"last"]
            assert log.statistics().partitions[0].skipped == 4
        for offset, who in ((1, "Heard"), (2, "the table of rates"), (3, "the table of rates"), (4, "a change")):
            assert f"rates[0]@{offset} can not be received by {who}" in caplog.text

    async def test_what_can_not_be_decoded_stops_it_by_default(self, topic: MemoryTopic) -> None:
        topic.put(b"EUR", b"{")
        log = log_over(topic)
        log.table(key=str, value=float)
        with pytest.raises(DecodeError, match=r"rates\[0\]@0 .* not a float"):
            async with log:
                await log.wait_caught_up(PATIENCE)

    async def test_retries_come_first_but_not_for_bytes(self, topic: MemoryTopic) -> None:
        policy = ErrorPolicy(retries=2, backoff_seconds=0.001, then=ErrorResponse.CONTINUE)
        log, tries = log_over(topic, on_error=policy), {b"twice": 0, b"never": 0, b"bytes": 0}

        @log.add_receiver
        def receive(record: IncomingRecord) -> None:
            assert record.key is not None
            tries[record.key] += 1
            if record.key == b"bytes":
                raise DecodeError("no")
            if record.key == b"never" or tries[record.key] < 3:
                raise OSError("not now")

        for key in tries:
            topic.put(key, b"")
        async with log:
            assert await log.wait_caught_up(PATIENCE)
            assert tries == {b"twice": 3, b"never": 3, b"bytes": 1}
            assert log.statistics().partitions[0].skipped == 2

    async def test_stop_does_not_wait_for_a_retry(self, topic: MemoryTopic) -> None:
        policy = ErrorPolicy(retries=1, backoff_seconds=3600, max_backoff_seconds=3600)
        topic.put(b"k", b"")
        log, tried = log_over(topic, on_error=policy), threading.Event()

        @log.add_receiver
        def receive(_record: IncomingRecord) -> None:
            tried.set()
            raise OSError("not now")

        async with log:
            await until(tried.is_set)
        assert log.state is SourceState.STOPPED

    async def test_a_callback_decides(self, topic: MemoryTopic) -> None:
        seen: list[tuple[int, str]] = []

        def decide(record: IncomingRecord, error: RecordError) -> ErrorResponse:
            seen.append((record.offset, str(error)))
            if record.value == b"raise":
                raise ValueError("callback")
            return ErrorResponse.CONTINUE if record.value == b"skip" else ErrorResponse.FAIL_CONSUMER

        for last, expected in ((b"stop", "@1 can not"), (b"raise", "on_error failed: ValueError: callback")):
            seen.clear()
            fresh = MemoryTopic()
            log = log_over(fresh, on_error=decide)
            log.add_receiver(Heard(refuse=b"bad"))
            fresh.put(b"bad", b"skip")
            fresh.put(b"bad", last)
            with pytest.raises(RecordError, match=expected):
                async with log:
                    await log.wait_caught_up(PATIENCE)
            assert [offset for offset, _ in seen] == [0, 1]
            assert "rates[0]@0" in seen[0][1]

    async def test_settings_that_can_not_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)
        with pytest.raises(ConfigError, match="KES_BOOTSTRAP_SERVERS"):
            GlobalChangeLog("t")
        monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", "h:1")
        assert "h:1" in repr(GlobalChangeLog("t"))
        for wrong, text in (
            ({"on_error": DEAD_LETTER}, "dead_letter"),
            ({"on_error": "skip"}, "on_error is 'skip'"),
            ({"topic_timeout_seconds": -1}, "topic_timeout_seconds"),
            ({"client_settings": {"isolation.level": "read_uncommitted"}}, "isolation.level"),
        ):
            with pytest.raises(ConfigError, match=text):
                GlobalChangeLog("t", **wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="topic"):
            GlobalChangeLog("")
        with pytest.raises(ConfigError, match="order"):
            GlobalChangeLog("t").table(key=float, value=int, ordered=True)

    async def test_secrets_are_not_shown(self, topic: MemoryTopic, caplog: pytest.LogCaptureFixture) -> None:
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


class TestTheTopic:
    async def test_one_that_is_not_there_is_waited_for_and_then_told(self, topic: MemoryTopic) -> None:
        topic.exists = False
        log = log_over(topic, topic_timeout_seconds=0.01)
        log.add_receiver(Heard())
        with pytest.raises(TopicError, match="topic rates does not exist at memory:9092"):
            await log.start()
        assert log.state is SourceState.CREATED
        patient = log_over(topic, topic_timeout_seconds=PATIENCE)
        patient.add_receiver(Heard())
        starting = asyncio.create_task(patient.start())
        await until(lambda: patient.state is SourceState.STARTING)
        topic.exists = True
        await starting
        await patient.stop()

    async def test_stop_while_it_starts(self, topic: MemoryTopic) -> None:
        topic.exists = False
        log, store = log_over(topic, topic_timeout_seconds=3600), Changes()
        log.add_receiver(store)
        starting = asyncio.create_task(log.start())
        await until(lambda: log.state is SourceState.STARTING)
        await log.stop()
        with pytest.raises(Stopped):
            await starting
        assert (log.state, store.ends) == (SourceState.STOPPED, 1)

    async def test_nobody_answers(self, topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch) -> None:
        topic.answers = False
        log = log_over(topic, topic_timeout_seconds=0.01)
        log.add_receiver(Heard())
        with pytest.raises(BrokerUnavailable):
            await log.start()

    @pytest.mark.parametrize("noticed_by", ["watching", "waiting", "reading"])
    @pytest.mark.parametrize("what", ["made again", "deleted"])
    async def test_one_that_is_not_the_same_any_more(
        self, topic: MemoryTopic, what: str, noticed_by: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if noticed_by == "watching":
            monkeypatch.setattr(log_reader, "WATCH_SECONDS", 0.01)
        topic.put(b"k", b"")
        log = log_over(topic)
        table = log.table(key=str, value=bytes)
        expected, text = (OffsetError, "id-1, and is id-2") if what == "made again" else (TopicError, "any more")

        async def body() -> None:
            async with log:
                assert await log.wait_caught_up(PATIENCE)
                topic.exists, topic.identity = what == "made again", "id-2"
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
        self, topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(log_reader, "RETRY_SECONDS", 0.01)
        log, heard = log_over(topic), Heard()
        log.add_receiver(heard)
        topic.put(b"a", b"")
        async with log:
            assert await log.wait_caught_up(PATIENCE)
            topic.failures[0] = [TopicError("not known"), TopicError("not known")]
            await until(lambda: not topic.failures[0])
            topic.put(b"b", b"")
            assert await log.wait_caught_up(PATIENCE)
            assert heard.keys == [b"a", b"b"]
            assert (0, 1) in topic.followed

    async def test_one_answer_that_it_is_not_there_is_not_believed(self, topic: MemoryTopic) -> None:
        log = log_over(topic)
        log.add_receiver(Heard())
        async with log:
            topic.unknown = 1
            assert await log.wait_caught_up(PATIENCE)
            assert topic.unknown == 0

    async def test_what_may_not_be_read_is_told_in_the_end(
        self, topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(log_reader, "RETRY_SECONDS", 0.01)
        log = log_over(topic, topic_timeout_seconds=0.05)
        log.add_receiver(Heard())
        topic.failures[1] = [TopicError("may not be read") for _ in range(1000)]
        with pytest.raises(TopicError, match="may not be read"):
            async with log:
                await log.wait_caught_up(PATIENCE)
        assert 900 < len(topic.failures[1]) < 999

    async def test_a_place_that_is_gone_is_an_error_at_once(self, topic: MemoryTopic) -> None:
        log = log_over(topic)
        log.add_receiver(Heard())
        topic.failures[1] = [OffsetError("rates[1]: offset 7 is not in the log")]
        with pytest.raises(OffsetError, match="offset 7"):
            async with log:
                await log.wait_stopped()

    async def test_a_broken_consumer_is_told(self, topic: MemoryTopic) -> None:
        log = log_over(topic)
        log.add_receiver(Heard())
        topic.failures[1] = [RuntimeError("broken")]
        with pytest.raises(Exception, match=r"rates can not go on: RuntimeError\('broken'\)"):
            async with log:
                await log.wait_stopped()

    @pytest.mark.parametrize("noticed_by", ["watching", "waiting"])
    async def test_new_partitions_are_read_too(
        self,
        topic: MemoryTopic,
        noticed_by: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        if noticed_by == "watching":
            monkeypatch.setattr(log_reader, "WATCH_SECONDS", 0.01)
        log = log_over(topic)
        table = log.table(key=str, value=bytes)
        async with log:
            assert await log.wait_caught_up(PATIENCE)
            topic.logs.append(type(topic.logs[0])())
            topic.put(b"k", b"v", 2)
            if noticed_by == "watching":
                await until(lambda: len(table) == 1)
            else:
                assert await log.wait_caught_up(PATIENCE)
            assert table.get("k") == b"v"
            assert "rates has 3 partitions now, 2 before" in caplog.text

    async def test_one_that_is_not_compacted_is_warned_of(
        self, topic: MemoryTopic, caplog: pytest.LogCaptureFixture
    ) -> None:
        topic.policy = "delete"
        log = log_over(topic)
        log.add_receiver(Heard())
        async with log:
            await until(lambda: "cleanup.policy=delete" in caplog.text)
