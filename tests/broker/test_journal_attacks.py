"""An attacker's tries at a journal: cancellations, a fork, a clock that jumps, claims in a row, a deleted group, two
services under one name, a tail of markers, and a dead leader that its supervisor removes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress

import pytest
from confluent_kafka.admin import AdminClient

from streams.core.journal import EntryMark, Payload, output_of
from streams.errors import NotLeading
from streams.journal import Journal, JournalItem, JournalTerm, TermBegan
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import ROOT
from tests.broker.gate import gate
from tests.broker.test_journal import all_of, events_of, journal_of, usurp
from tests.unit.waiting import until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


@pytest.mark.parametrize("count", gate([40, 1_000], 40))
async def test_appends_that_are_cancelled_at_random_are_in_the_log_once_or_never(
    kafka_broker: BrokerAddress, topic_prefix: str, seed: int, count: int
) -> None:
    """And what ``submit`` says of each is what the log says, also of those whose waiting task was cancelled."""
    journal, luck = journal_of(kafka_broker, topic_prefix + "cancelled"), random.Random(seed)
    await journal.create()
    handles = {}
    async with journal.lead() as term:

        async def append(number: int) -> int:
            value = b"%d" % number
            if number % 2:
                return await term.append(value)
            handles[value] = term.submit(value)
            return await handles[value]

        tasks = []
        for number in range(count):
            tasks.append(asyncio.create_task(append(number)))
            await asyncio.wait(tasks[-1:], timeout=luck.choice([0, 0, 0.001, 0.004]))
            luck.choice(tasks[-8:]).cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for handle in handles.values():
            await handle
        await term.append(b"last")
    there = events_of(await all_of(journal))
    assert len(set(there)) == len(there)
    returned = {b"%d" % number for number, answer in enumerate(answers) if isinstance(answer, int)}
    assert returned | handles.keys() | {b"last"} <= set(there)
    assert {answer.__class__ for answer in answers} <= {int, asyncio.CancelledError}


@pytest.mark.nightly
async def test_a_fork_of_a_leader_appends_nothing(kafka_broker: BrokerAddress, topic_prefix: str) -> None:
    """Nothing is sent there, since no thread of the parent is; and the parent goes on undisturbed."""
    journal = journal_of(kafka_broker, topic_prefix + "forked")
    await journal.create()
    async with journal.lead() as term:
        await term.append(b"before")
        child = os.fork()
        if not child:
            os._exit(tries_to_append(term))
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            await term.append(b"meanwhile")
        assert os.waitstatus_to_exitcode(ended[1]) == 7
        await term.append(b"after")
    there = events_of(await all_of(journal))
    assert (there[0], there[-1], set(there[1:-1])) == (b"before", b"after", {b"meanwhile"})


def tries_to_append(term: JournalTerm) -> int:
    try:
        asyncio.run(asyncio.wait_for(term.append(b"of the fork"), 2))
    except BaseException:
        return 7
    return 0


@pytest.mark.parametrize("claims", gate([2, 10], 2))
async def test_many_claims_in_a_row_leave_one_writer(
    kafka_broker: BrokerAddress, topic_prefix: str, claims: int
) -> None:
    """Each fences the one before, whose append raises, whatever the group says."""
    journal = journal_of(kafka_broker, topic_prefix + "claims")
    await journal.create()
    async with journal.lead() as term:
        await term.append(b"first")
        for _ in range(claims):
            await usurp(journal)
        with pytest.raises(NotLeading):
            await term.append(b"of a term that is over")
    items = await all_of(journal)
    terms = [item.term for item in items if isinstance(item, TermBegan)]
    assert len(terms) == claims + 1
    assert events_of(items) == [b"first"]


@pytest.mark.nightly
async def test_a_group_that_is_deleted_costs_a_term_and_no_entry(
    kafka_broker: BrokerAddress, topic_prefix: str
) -> None:
    """Kafka deletes an empty group only: between two terms. The next one begins with generation 1 again."""
    journal = journal_of(kafka_broker, topic_prefix + "group")
    await journal.create()
    tokens = []
    for turn in range(2):
        async with journal.lead() as term:
            await term.append(b"%d" % turn)
            tokens.append(term.token)
        admin = AdminClient({"bootstrap.servers": kafka_broker.bootstrap_servers})
        admin.delete_consumer_groups([f"{journal.name}.leader"])[f"{journal.name}.leader"].result(30)
    async with journal.lead() as term:
        tokens.append(term.token)
    assert tokens == sorted(set(tokens))
    assert events_of(await all_of(journal)) == [b"0", b"1"]


@pytest.mark.nightly
async def test_a_promoted_node_does_not_hang_on_a_tail_of_markers(
    kafka_broker: BrokerAddress, topic_prefix: str
) -> None:
    journal = journal_of(kafka_broker, topic_prefix + "markers")
    await journal.create()
    abort_an_entry(journal, EntryMark(0, 1))
    async with asyncio.timeout(20):
        assert await all_of(journal) == []
        assert (await journal.check()).end > 0
    async with journal.lead() as term:
        await term.append(b"last")
    abort_an_entry(journal, EntryMark(term.token, 2))
    async with asyncio.timeout(20):
        assert events_of(await all_of(journal)) == [b"last"]
        async with journal.lead() as second, journal.reader() as reader:
            items: list[JournalItem] = [item async for item in reader.catch_up()]
            assert items[-1].term == second.token


def abort_an_entry(journal: Journal, mark: EntryMark) -> None:
    with journal.claim() as claim:
        claim.take()
        claim._slot.send([output_of(journal.name, Payload([], b"x"), mark)])
        claim.take()


@pytest.mark.nightly
async def test_a_term_that_is_left_leaves_no_thread_behind(kafka_broker: BrokerAddress, topic_prefix: str) -> None:
    journal = journal_of(kafka_broker, topic_prefix + "threads")
    await journal.create()
    async with journal.lead() as term:  # what is shared by all is there from now on
        await term.append(b"x")
    await until(lambda: own_threads(journal) == 0, "the threads of the first end")
    for _ in range(3):
        async with journal.lead() as term, journal.reader() as reader:
            await reader.end()
    await until(lambda: own_threads(journal) == 0, "all threads end")


def own_threads(journal: Journal) -> int:
    return sum(journal.name in thread.name for thread in threading.enumerate())


LEADER = """
import asyncio, sys
from streams import Journal

async def main(name, servers):
    journal = Journal(name, bootstrap_servers=servers, replication_factor=1, min_insync_replicas=1, session_seconds=30)
    candidate = journal.candidate()
    async with journal.lead(candidate=candidate) as term:
        await term.append(b"of the dead one")
        print(candidate.member_id, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.nightly
async def test_a_dead_leader_that_is_removed_is_replaced_at_once(
    kafka_broker: BrokerAddress, topic_prefix: str
) -> None:
    """The session has 30 seconds; the aim of a quiet machine, of a second, is measured by the benchmarks."""
    journal = journal_of(kafka_broker, topic_prefix + "supervised", session_seconds=30.0)
    await journal.create()
    words = [sys.executable, "-c", LEADER, journal.name, kafka_broker.bootstrap_servers]
    leader = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert leader.stdout is not None
    member = (await asyncio.wait_for(leader.stdout.readline(), 60)).decode().strip()
    began, candidate = 0.0, journal.candidate()

    async def succeed() -> tuple[float, int]:
        async with journal.lead(candidate=candidate) as term:
            return time.monotonic() - began, await term.append(b"of the successor")

    successor = asyncio.create_task(succeed())
    try:
        while not candidate.member_id:
            await asyncio.sleep(0.01)
        assert not successor.done()
        began = time.monotonic()
        leader.send_signal(signal.SIGKILL)
        await leader.wait()
        assert await journal.remove_member(member)
        seconds, _ = await asyncio.wait_for(successor, 60)
    finally:
        with suppress(ProcessLookupError):
            leader.kill()
        successor.cancel()
    print(f"replaced after {seconds:.2f} s")
    assert seconds < 15
    assert events_of(await all_of(journal)) == [b"of the dead one", b"of the successor"]
    assert not await journal.remove_member(member)
