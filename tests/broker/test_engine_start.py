"""Starting: what is too late, offsets that do not fit, one name for two sources."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from streams import SourceState
from streams.errors import OffsetError, RegistrationError
from streams.metrics import Measurement, TransactionSettled
from tests.broker.engine_kit import PATIENCE, Lab, Running, handle, source_of, start_failure
from tests.vocabulary import Total

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]


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


# -- offsets that do not fit -------------------------------------------------------------------------------------------


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
