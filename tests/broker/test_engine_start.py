"""Starting and stopping: registration, topics, offsets and changelogs that are not as they should be, and no broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from confluent_kafka import Producer

from streams import SourceState
from streams.errors import OffsetError, RegistrationError, TopicError
from streams.metrics import Measurement, OffsetMismatch, TransactionSettled
from streams.runtime.changelog import OFFSET_KEY
from tests.broker.engine_kit import PATIENCE, Lab, Running, handle, source_of, start_failure
from tests.vocabulary import Total

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]


# -- registration ------------------------------------------------------------------------------------------------------


async def test_what_is_too_late_for_a_source_that_runs(lab: Lab) -> None:
    source = source_of(lab)
    await lab.create()
    async with Running(source):
        with pytest.raises(RegistrationError, match="too late"):
            source.register_event_type(Total, lambda ctx, event: None)
        with pytest.raises(RegistrationError, match="running already"):
            await source.consume_events()
        with pytest.raises(RegistrationError, match="running"):
            await source.delete_source()
        assert source.state is SourceState.RUNNING
    assert source.state is SourceState.STOPPED
    async with Running(source):
        assert source.state is SourceState.RUNNING, "one object may run again"


async def test_create_and_delete_source(lab: Lab) -> None:
    source = lab.source()
    names = [lab.topic, lab.changelog, lab.dead_letter_topic]
    assert await source.create_source() == names
    assert await source.create_source() == []
    described = lab.admin.describe(names)
    assert described[lab.changelog].configs["cleanup.policy"] == "compact"  # type: ignore[union-attr]
    assert await source.delete_source() == names
    assert set(lab.admin.describe(names).values()) == {None}


# -- topics that are not as they should be -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["source", "changelog", "dead letters"])
async def test_another_partition_count(lab: Lab, wrong: str) -> None:
    name = {"source": lab.topic, "changelog": lab.changelog, "dead letters": lab.dead_letter_topic}[wrong]
    configs = {"cleanup_policy": "compact"} if wrong == "changelog" else {}
    await lab.create(name, partitions=3, **configs)
    error = await start_failure(source_of(lab))
    assert isinstance(error, TopicError), repr(error)
    assert name in str(error)
    assert "3" in str(error)


async def test_a_changelog_that_is_not_compacted(lab: Lab) -> None:
    await lab.create(lab.changelog, cleanup_policy="delete")
    error = await start_failure(source_of(lab))
    assert isinstance(error, TopicError), repr(error)
    assert lab.changelog in str(error)
    assert "compact" in str(error)


# -- changelogs with strange contents ----------------------------------------------------------------------------------


async def taken(lab: Lab, topic: str, value: bytes) -> None:
    """Produce a record without a key, once: the broker goes by a topic's new settings some time after it took them."""
    producer, refused = Producer({"bootstrap.servers": lab.bootstrap, "log_level": 0}), [True]
    deadline = time.monotonic() + PATIENCE
    while refused.pop():
        assert time.monotonic() < deadline, "the broker wants keys"
        producer.produce(topic, value, partition=0, on_delivery=lambda error, _: refused.append(error is not None))
        assert await asyncio.to_thread(producer.flush, PATIENCE) == 0


async def test_foreign_records_and_tombstones(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """A record without key is ignored with a word; tombstones of keys that never were are no harm, a storm neither."""
    await lab.create()
    await handle(lab, "a", "b", until_offset=2)
    await lab.alter(lab.changelog, "cleanup.policy", "delete")  # while it is compacted, the broker wants keys
    await taken(lab, lab.changelog, b"who am I?")
    await lab.alter(lab.changelog, "cleanup.policy", "compact")
    for number in range(2_000):
        await lab.send(None, f"never-{number % 50}".encode(), None, topic=lab.changelog)
    await lab.send(None, b"b", None, topic=lab.changelog)
    await lab.send(None, b"\xff\xffkes.something-newer", None, topic=lab.changelog)
    await lab.flush()
    await handle(lab, "a", "b", until_offset=4)
    assert await lab.counts() == {"a": 2, "b": 1}
    assert "without key" in caplog.text
    assert f"{lab.changelog}[0]@" in caplog.text


async def test_gaps_of_aborted_transactions(lab: Lab) -> None:
    """A changelog whose tail is nothing but aborted records and markers: the position counts."""
    await lab.create()
    await handle(lab, "a", until_offset=1)

    def abort() -> None:
        producer = Producer({"bootstrap.servers": lab.bootstrap, "transactional.id": lab.group, "log_level": 0})
        producer.init_transactions(PATIENCE)
        for _ in range(3):
            producer.begin_transaction()
            producer.produce(lab.changelog, b"nonsense", b"a", partition=0)
            producer.produce(lab.changelog, b"nonsense", OFFSET_KEY, partition=0)
            producer.flush(PATIENCE)
            producer.abort_transaction(PATIENCE)

    await asyncio.to_thread(abort)
    await handle(lab, "a", until_offset=2)
    assert await lab.counts() == {"a": 2}


# -- offsets that do not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reset", "wanted"), [("earliest", {"a": 1, "b": 1}), ("latest", {"b": 1}), ("error", None)])
async def test_where_a_new_partition_starts(lab: Lab, reset: str, wanted: dict[str, int] | None) -> None:
    await lab.create()
    await lab.add("a")
    source = source_of(lab, auto_offset_reset=reset)
    if wanted is None:
        error = await start_failure(source)
        assert isinstance(error, OffsetError), repr(error)
        assert f"{lab.topic}[0]" in str(error)
        assert "auto_offset_reset" in str(error)
        return
    async with Running(source) as run:
        await lab.add("b")
        await run.until_handled(2)
    assert await lab.counts() == wanted


async def test_latest_that_was_never_committed_starts_anew(lab: Lab) -> None:
    """And once something is committed the setting has no effect any more."""
    await lab.create()
    await handle(lab, "a", until_offset=1)
    await lab.add("b")
    await handle(lab, until_offset=2, auto_offset_reset="latest")
    await handle(lab, "c", until_offset=3, auto_offset_reset="error")
    assert await lab.counts() == {"a": 1, "b": 1, "c": 1}


async def make_again(lab: Lab) -> tuple[str, ...]:
    await lab.delete(lab.topic)
    await lab.create(lab.topic)
    await lab.add("x", "y", "z")
    [description] = lab.admin.describe([lab.topic]).values()
    assert description is not None
    return (description.topic_id.translate(str.maketrans("+/", "-_")),)  # the ids are named


async def cut_the_log(lab: Lab) -> tuple[str, ...]:
    await lab.add("c", "d", "e")
    await lab.delete_records(lab.topic, {0: 4})
    return "2", "4"


async def lose_the_changelog(lab: Lab) -> tuple[str, ...]:
    """The group has an offset, the state is gone: starting from nothing would be silently wrong."""
    await lab.delete(lab.changelog)
    return (lab.changelog,)


@pytest.mark.parametrize("happens", [make_again, cut_the_log, lose_the_changelog])
async def test_an_offset_that_does_not_fit_is_refused_by_name(
    lab: Lab, happens: Callable[[Lab], Awaitable[tuple[str, ...]]]
) -> None:
    await lab.create()
    await handle(lab, "a", "b", until_offset=2)
    named = await happens(lab)
    error = await start_failure(source_of(lab))
    assert isinstance(error, OffsetError), repr(error)
    for text in (f"{lab.topic}[0]", *named):
        assert text in str(error)
    if happens is not lose_the_changelog:
        assert await lab.counts() == {"a": 1, "b": 1}, "nothing was touched"


async def test_log_cut_up_to_the_offset_is_fine(lab: Lab) -> None:
    await lab.create()
    await handle(lab, "a", "b", until_offset=2)
    await lab.delete_records(lab.topic, {0: 2})
    await handle(lab, "a", until_offset=3)
    assert await lab.counts() == {"a": 2, "b": 1}


async def test_group_offset_gone_or_moved(lab: Lab) -> None:
    """The changelog wins, and the difference is reported."""
    await lab.create()
    await lab.create(lab.changelog, cleanup_policy="compact")
    await lab.add("passed", "taken")
    record = b'{"offset":1,"writer":"w","serial":1,"generation":1,"source_id":""}'
    await lab.send(record, OFFSET_KEY, None, topic=lab.changelog)
    await lab.flush()
    measured = await handle(lab, until_offset=2)
    assert OffsetMismatch(0, -1, 1) in measured
    assert await lab.counts() == {"taken": 1}


# -- no broker, and stopping -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("membership", ["streams", "librdkafka"])
async def test_a_second_process_of_one_name_does_not_disturb_the_first(
    lab: Lab, membership: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It opens no producer before the group has let it in: the first one's would be fenced."""
    await lab.create()
    measured: list[Measurement] = []
    settings = {
        "instance_id": "shop",
        "membership": membership,
        "strategy": "incremental" if membership == "streams" else "range",
    }
    first = source_of(lab, metrics_handler=measured.append, **settings)
    async with Running(first) as run:
        await lab.add("a")
        await run.until_handled(1)
        second = source_of(lab, **settings)
        task = asyncio.create_task(second.consume_events())
        await run.until(lambda: "waiting for it to go" in caplog.text, "the second one finds the first")
        for number in range(2, 8):  # each of its producers has its turn
            await lab.add("a")
            await run.until_handled(number)
        second.stop_now()
        await asyncio.wait_for(task, PATIENCE)
    settled = [measurement for measurement in measured if isinstance(measurement, TransactionSettled)]
    assert len(settled) >= 7
    assert all(it.committed and it.attempts == 1 for it in settled), settled
