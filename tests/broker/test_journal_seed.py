"""The eleven defects of the package that journals come from, by their numbers, as far as they can exist here."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from streams.core.journal import EntryMark, Payload, output_of
from streams.errors import EncodeError, NotLeading, OffsetError, RecordRefused, ReplicaFailed, StreamsError, TopicError
from streams.journal import Journal, JournalCheckpoint, JournalEntry, JournalItem
from streams.testing.fixtures import BrokerAddress
from streams.topics import TopicSpec
from tests.broker.client_kit import truncate
from tests.broker.test_journal import all_of, events_of, journal_of, usurp
from tests.broker.test_replicated import Members, accounts, move
from tests.unit.waiting import until

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(120)]


class Measured(msgspec.Struct, frozen=True):
    value: float


@pytest.fixture
async def journal(kafka_broker: BrokerAddress, topic_prefix: str) -> Journal:
    journal = journal_of(kafka_broker, topic_prefix + "seed", events=[bytes, Measured])
    await journal.create()
    return journal


async def test_1_a_paused_primary_appends_nothing_behind_its_successor(journal: Journal) -> None:
    async def paused() -> None:
        async with journal.lead() as term:
            await term.append(b"before")
            await usurp(journal)
            await term.append(b"late")

    with pytest.raises(NotLeading):
        await paused()
    assert events_of(await all_of(journal)) == [b"before"]


async def test_2_two_do_not_lead_at_a_time(journal: Journal) -> None:
    leading: list[int] = []
    most = 0

    async def stand() -> None:
        nonlocal most
        async with journal.lead() as term:
            leading.append(term.token)
            most = max(most, len(leading))
            await term.append(b"%d" % term.token)
            leading.remove(term.token)

    await asyncio.gather(*(stand() for _ in range(3)))
    entries = [item for item in await all_of(journal) if isinstance(item, JournalEntry)]
    assert most == 1
    assert [entry.event for entry in entries] == [b"%d" % entry.term for entry in entries]


async def test_3_a_checkpoint_covers_what_was_observed(journal: Journal) -> None:
    """On an empty log, and right after a take-over: nothing is skipped, and nothing read twice."""
    covers: list[int] = []
    for name in (b"first", b"second"):
        async with journal.lead() as term:
            async with term.checkpoint() as pending:
                covers.append(pending.position)
            await term.append(name)
    assert events_of(await all_of(journal, covers[0])) == [b"first", b"second"]
    assert events_of(await all_of(journal, covers[1])) == [b"second"]
    found = [item for item in await all_of(journal) if isinstance(item, JournalCheckpoint)]
    assert [item.covers for item in found] == covers
    assert events_of(await all_of(journal, found[0].position)) == [b"first", b"second"]


async def test_4_a_failed_write_gives_no_position(journal: Journal) -> None:
    async with journal.lead() as term:
        before = term.position
        with pytest.raises(EncodeError, match="nan"):
            await term.append(Measured(float("nan")))
        with pytest.raises(RecordRefused, match="MSG_SIZE_TOO_LARGE"):
            await term.append(b"x" * 1_100_000)
        assert term.position == before
        await term.append(b"fine")
    assert events_of(await all_of(journal)) == [b"fine"]


async def test_5_a_checkpoint_is_appended_behind_its_state_and_its_barrier_cannot_be_forgotten(
    journal: Journal,
) -> None:
    async def fails() -> None:
        async with journal.lead() as term, term.checkpoint():
            raise RuntimeError("the state is not saved")

    with pytest.raises(RuntimeError, match="the state is not saved"):
        await fails()
    async with journal.lead() as term:
        await term.append(b"goes on")
    assert not any(isinstance(item, JournalCheckpoint) for item in await all_of(journal))


async def test_6_a_topic_that_cannot_be_made_is_an_error(kafka_broker: BrokerAddress, topic_prefix: str) -> None:
    with pytest.raises(StreamsError, match=r"(?i)replication"):
        await journal_of(kafka_broker, topic_prefix + "six", replication_factor=3).create()


async def test_7_a_topic_that_loses_entries_is_refused_and_a_reader_does_not_jump(
    kafka_broker: BrokerAddress, topic_prefix: str, journal: Journal, admin: TopicAdmin, settings: ClientSettings
) -> None:
    week = TopicSpec(
        name=topic_prefix + "week", partitions=1, replication_factor=1, configs={"retention.ms": "604800000"}
    )
    admin.create([week])
    with pytest.raises(TopicError, match=r"retention\.ms=604800000, settings say -1"):
        await all_of(journal_of(kafka_broker, week.name))
    async with journal.lead() as term:
        first, last = await term.append(b"1"), await term.append(b"2")
    truncate(settings, journal.name, 0, last)
    with pytest.raises(OffsetError, match="entries that are needed were trimmed"):
        await all_of(journal, first)
    with pytest.raises(OffsetError, match="the log has lost entries"):  # the seed waited for ever
        await all_of(journal, 5_000)


async def test_8_a_promoted_node_does_not_hang_on_a_tail_of_markers(journal: Journal) -> None:
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


async def test_9_a_term_that_is_left_leaves_no_thread_behind(journal: Journal) -> None:
    async with journal.lead() as term:  # what is shared by all is there from now on
        await term.append(b"x")
    await until(lambda: own_threads(journal) == 0, "the threads of the first end")
    for _ in range(3):
        async with journal.lead() as term, journal.reader() as reader:
            await reader.end()
    await until(lambda: own_threads(journal) == 0, "all threads end")


def own_threads(journal: Journal) -> int:
    return sum(journal.name in thread.name for thread in threading.enumerate())


async def test_10_an_entry_that_the_state_refuses_is_not_in_the_log(
    kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path
) -> None:
    members = Members(kafka_broker, topic_prefix + "bank", tmp_path)
    await members.journal().create()
    async with members.member(1) as member:
        await until(lambda: member.is_leading, "it leads")
        with pytest.raises(ReplicaFailed):
            await member.decide(move("a", "broken", 1))
        await until(lambda: member.is_leading, "it leads again")
        assert await member.read(accounts) == {"a": 100, "b": 100}
    assert events_of(await all_of(members.journal())) == []


async def test_11_a_fuzzy_checkpoint_stops_no_append(journal: Journal) -> None:
    async with journal.lead() as term:
        position = await term.append(b"copied")
        async with term.checkpoint(at=position):
            other: Any = asyncio.create_task(term.append(b"meanwhile"))
            await asyncio.wait_for(other, 20)
    found = [item for item in await all_of(journal) if isinstance(item, JournalCheckpoint)]
    assert [item.covers for item in found] == [position]
    assert events_of(await all_of(journal, found[0].covers)) == [b"meanwhile"]
