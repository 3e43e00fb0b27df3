"""Transactions of a program against scripted brokers: which are sent again, what is raised, that nothing is left."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from streams.errors import RecordRefused, TransactionFailed
from streams.kafka.settings import ClientSettings
from streams.kafka.writing.blocking import Transactions
from streams.records import Output
from tests.unit.scripted_broker import GONE, MUTE, PARTITIONS, ScriptedBroker, named, output
from tests.unit.waiting import only_new_garbage, says_at_last, threads_since, wait_until

OUTPUTS = [output(n, n % PARTITIONS) for n in range(8)]


@pytest.fixture(params=[2])
def broker(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[ScriptedBroker]:
    """On a thread of its own, because the calls block. At the end only that thread is left of those that began."""
    only_new_garbage()
    before = threading.enumerate()
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(ScriptedBroker(transaction_version=request.param)) as scripted,
    ):
        yield scripted
        assert len(threads_since(before)) == 1
    gc.collect()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def transactions(broker: ScriptedBroker, seconds: float = 20.0) -> Any:
    settings = ClientSettings(broker.bootstrap_servers, {"linger.ms": 5, "batch.size": 100})
    return closing(Transactions(settings, "id", 60.0, seconds))


def outcome(running: Transactions, outputs: list[Output] = OUTPUTS) -> str:
    try:
        running.commit(outputs)
    except RecordRefused:
        return "refused"
    except TransactionFailed as failed:
        return f"{failed.call} {failed.kind}"
    return "committed"


COMMIT, ABORT = True, False
ROWS: list[tuple[int, str, list[Any], str, list[bool]]] = [
    # transaction version, request, its first answers, what becomes of the records, the ends that are requested
    (2, "Metadata", [GONE, GONE, GONE], "committed", [COMMIT]),
    (2, "InitProducerId", [GONE, 47], "committed", [COMMIT]),
    (2, "Produce", [GONE, GONE], "committed", [COMMIT]),  # by its epoch it has begun nowhere
    (1, "Produce", [GONE], "committed", [ABORT, COMMIT]),  # opening the slot has aborted it, maybe in part
    (2, "Produce", [120, 45], "committed", [ABORT, ABORT, COMMIT]),
    (1, "Produce", [120], "committed", [ABORT, COMMIT]),
    (2, "Produce", [10], "committed", [ABORT, COMMIT]),  # in smaller batches
    (2, "Produce", [named(0, "no key")], "refused", [ABORT]),
    (2, "Produce", [87], "refused", [ABORT]),
    (2, "Produce", [29], "refused", [ABORT]),
    (2, "Produce", [47], "flush fenced", [ABORT]),
    (1, "AddPartitions", [53], "committed", [ABORT, COMMIT]),
    (2, "Produce", [MUTE] * 9, "flush unknown", []),
    (2, "EndTxn", [51, 15], "committed", [COMMIT] * 3),
    (2, "EndTxn", [GONE], "committed", [COMMIT] * 2),  # its epoch tells whether it was carried out
    (1, "EndTxn", [GONE], "commit_transaction unknown", [COMMIT]),
    (2, "EndTxn", [48], "commit_transaction unknown", [COMMIT]),
    (2, "EndTxn", [47], "commit_transaction fenced", [COMMIT]),
    (2, "EndTxn", [GONE, 47], "commit_transaction unknown", [COMMIT] * 2),  # by the first one it may be committed
    (2, "EndTxn", [MUTE], "commit_transaction unknown", [COMMIT]),
]


@pytest.mark.parametrize(
    ("broker", "request_name", "first", "becomes", "ends"),
    ROWS,
    indirect=["broker"],
    ids=[f"{row[1]}-{row[3]}-{len(row[4])}-v{row[0]}" for row in ROWS],
)
def test_each_answer(
    broker: ScriptedBroker, request_name: str, first: list[Any], becomes: str, ends: list[bool]
) -> None:
    broker.answer(request_name, *first)
    with transactions(broker, 0.5 if MUTE in first else 20.0) as running:
        began = time.monotonic()
        assert outcome(running) == becomes
        assert time.monotonic() - began < 20, "it waits for its patience"
        assert [request.committed for _, name, request in broker.requests if name == "EndTxn"] == ends
        broker.script.clear()
        wait_until(lambda: outcome(running) == "committed", "it goes on, as soon as it has the time for it")


def test_when_the_time_is_over_the_last_failure_is_raised(broker: ScriptedBroker) -> None:
    broker.answer("Produce", *[19] * 1000)

    def commit(seconds: float) -> None:
        with transactions(broker, seconds) as running:
            running.commit(OUTPUTS)

    says_at_last(TransactionFailed, r"t\[\d\]: .*Not enough replicas", commit)


def test_batches_shrink_until_the_topic_takes_them(broker: ScriptedBroker) -> None:
    broker.batch_limit = 30_000
    broker.answer("Produce", 10)
    with transactions(broker) as running:
        assert outcome(running, [output(n, 0, size=1000) for n in range(100)]) == "committed"
    assert len(broker.asked("Produce")) == 1 + 4


async def test_on_the_thread_of_a_running_loop_one_producer_makes_all(broker: ScriptedBroker) -> None:
    with transactions(broker) as running:
        assert [outcome(running) for _ in range(3)] == ["committed"] * 3
        assert outcome(running, []) == "committed"
    assert broker.asked("InitProducerId", "Produce", "EndTxn") == ["InitProducerId", *["Produce", "EndTxn"] * 3]


@pytest.mark.parametrize("request_name", ["ApiVersions", "Produce", "EndTxn"])
def test_ctrl_c_in_the_middle(broker: ScriptedBroker, request_name: str) -> None:
    broker.answer(request_name, MUTE)
    before = threading.enumerate()

    def interrupt() -> None:
        wait_until(lambda: broker.asked(request_name))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with transactions(broker) as running:
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            running.commit(OUTPUTS)
        interrupting.join()
        assert threads_since(before) == []
        assert outcome(running) == "committed"
