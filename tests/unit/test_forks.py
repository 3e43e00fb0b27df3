"""What was made before a fork is refused in the child by name; it hung there, or answered from what it was."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streams import EventProducer, EventSourceConfig, GlobalChangeLog, QueryConfig, Record
from streams.errors import ConfigError, NotDelivered, StoreError
from streams.queries.reader import StateReader
from streams.runtime.bridge import Worker
from streams.views.blocking import LoopThread
from tests.unit.waiting import PATIENCE

NOBODY = "127.0.0.1:1"


def refused_in_a_child(use: Callable[[], object], error: type[Exception] = ConfigError) -> bool:
    """Fork, and look whether ``use`` is refused there. For the main thread."""
    # A child drops what the other threads have of their own. PySpark's connection of the main thread would be shut down
    # so, also for the parent; the next one has no active session, and Spark finds no data source in Python any more.
    assert threading.current_thread() is threading.main_thread()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(int(PATIENCE))
            use()
        except error as refusal:
            code = 0 if "was made before a fork" in str(refusal) else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


async def run_nothing() -> None: ...


def run(coroutine: Any) -> Callable[[], object]:
    return lambda: asyncio.run(coroutine())


def test_a_producer_is_refused_and_its_parent_goes_on() -> None:
    record = Record("t", b"1")
    producer = EventProducer(NOBODY, transactional_id="x", delivery_timeout_seconds=0.5).__enter__()
    producer.send_soon(record)
    producer._transactions._connect()  # a loop on a thread of its own
    for use in (lambda: producer.send_soon(record), lambda: producer.send(record), producer.flush):
        assert refused_in_a_child(use)
    assert refused_in_a_child(lambda: [producer.close(None), producer.send(record)])  # type: ignore[func-returns-value]
    producer.send_soon(record)
    with pytest.raises(NotDelivered, match="2 records were not delivered"):
        producer.close(None)


async def test_an_async_producer_is_refused_after_a_fork_and_in_another_loop() -> None:
    record = Record("t", b"1")
    producer = await EventProducer(NOBODY, delivery_timeout_seconds=0.5).__aenter__()
    await producer.send_soon(record)
    calls: list[Callable[[], Any]] = [lambda: producer.send(record), lambda: producer.send_soon(record), producer.flush]
    for call in calls:
        with pytest.raises(ConfigError, match="belongs to the event loop on which it was entered"):
            await asyncio.to_thread(run(call))
    in_a_child = run(lambda: producer.close(None))
    assert refused_in_a_child(lambda: [in_a_child(), producer._queue.take(record)])
    with pytest.raises(NotDelivered, match="1 records were not delivered"):
        await producer.close(None)


async def test_what_has_threads_of_its_own_is_refused(tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_bytes(b"0123456789abcdef")
    secret.chmod(0o600)
    worker, thread = Worker("kes-journal-reader"), LoopThread()
    config = EventSourceConfig(
        group_id="g",
        topic="t",
        num_partitions=1,
        bootstrap_servers=NOBODY,
        queries=QueryConfig(secret_file=str(secret)),
    )
    table = GlobalChangeLog("t", bootstrap_servers=NOBODY).table(key=str, value=int)
    async with StateReader(config, key=str, value=int) as reader:
        for use in (
            run(lambda: worker.call(print)),
            run(lambda: reader.get("a")),
            lambda: thread.call(run_nothing),
        ):
            assert refused_in_a_child(use)
        assert refused_in_a_child(lambda: table.get("a"), StoreError)
    worker.abandon()
    thread._loop.call_soon_threadsafe(thread._loop.stop)
    assert table.get("a") is None
