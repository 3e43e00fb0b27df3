"""Journals on a real broker: what was acknowledged is there, one process writes, and nothing is skipped."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams import NotLeading, event_type, upcaster
from streams.errors import AppendConflict, ConfigError, OffsetError, TopicError, TopicReplaced
from streams.journal import Journal, JournalCheckpoint, JournalEntry, JournalItem, JournalReader, SyncJournal, TermBegan
from streams.journal.writer import TermWriter
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.testing.fixtures import BrokerAddress
from tests.broker.client_kit import truncate
from tests.broker.test_wire_producer import alter

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@event_type("Transferred", version=2)
class Transferred(msgspec.Struct, frozen=True):
    cents: int
    note: str


class Unknown(msgspec.Struct):
    pass


@upcaster(Transferred, from_version=1)
def add_note(old: dict[str, Any]) -> dict[str, Any]:
    return old | {"note": "none"}


@pytest.fixture
def journal(kafka_broker: BrokerAddress, topic_prefix: str) -> Journal:
    return journal_of(kafka_broker, topic_prefix + "ledger")


def journal_of(broker: BrokerAddress, name: str, **more: Any) -> Journal:
    settings: dict[str, Any] = {"events": [bytes, Transferred], "replication_factor": 1, "min_insync_replicas": 1}
    return Journal(name, bootstrap_servers=broker.bootstrap_servers, **(settings | more))


async def all_of(journal: Journal, after: int | None = None) -> list[JournalItem]:
    async with journal.reader(after=after) as reader:
        return [item async for item in reader.catch_up()]


def events_of(items: list[JournalItem]) -> list[Any]:
    return [item.event for item in items if isinstance(item, JournalEntry)]


async def test_what_was_acknowledged_is_there_at_its_position_for_the_next_leader(journal: Journal) -> None:
    assert await journal.create()
    assert not await journal.create()
    assert await all_of(journal) == []
    async with journal.lead() as first:
        assert repr(first) == f"JournalTerm({journal.name!r}, 0)"
        one = await first.append(b"one")
        many = await asyncio.gather(*(first.append(b"%d" % number, b"again") for number in range(40)))
        two = await first.append(Transferred(5, "x"), expect=many[-1])
        with pytest.raises(AppendConflict, match=rf"up to {two}, behind the expected {one}; nothing is appended"):
            await first.append(b"late", expect=one)
        await asyncio.gather(*(first.barrier() for _ in range(5)))
        handle = first.submit(b"last")
        with pytest.raises(ConfigError, match="without an event"):
            await first.append()
        with pytest.raises(ConfigError, match="none of the events of this journal"):
            await first.append(Unknown())
    assert first.is_over
    assert first.reason == "it was left"
    with pytest.raises(NotLeading, match="it was left; nothing is appended"):
        await first.append(b"late")
    try:  # it was settled before the term was left: one way or the other
        last = [await handle]
    except NotLeading:
        last = []
    async with journal.lead() as second:
        assert second.token > first.token
        items = await all_of(journal)
    by_position = {item.position: item for item in items}
    assert all(number in by_position for number in [one, *many, two, *last])
    events = events_of(items)
    assert events[:2] == [b"one", b"0"]
    assert sorted(event for event in events[1:81] if event != b"again") == sorted(b"%d" % each for each in range(40))
    assert events[81:] == [Transferred(5, "x"), *([b"last"] if last else [])]
    terms = [item for item in items if isinstance(item, TermBegan)]
    assert [(term.term, term.previous) for term in terms] == [(first.token, -1), (second.token, first.token)]
    assert all(item.term == first.token for item in items if isinstance(item, JournalEntry))
    async with journal.reader(after=two) as reader:
        assert events_of([item async for item in reader.catch_up()]) == ([b"last"] if last else [])
        assert reader.position == await reader.end()  # behind the last marker
        async with journal.lead() as third:
            waiting = asyncio.create_task(anext_entry(reader))
            await third.append(b"followed")
            assert await waiting == b"followed"


async def gather(reader: JournalReader, into: list[JournalItem]) -> None:
    async for item in reader.catch_up():
        into.append(item)


async def anext_entry(reader: JournalReader) -> Any:
    async for item in reader.follow():
        if isinstance(item, JournalEntry):
            return item.event
    raise AssertionError


async def test_a_checkpoint_holds_appends_back_and_says_what_it_covers(journal: Journal) -> None:
    await journal.create()
    async with journal.lead() as term:
        async with term.checkpoint("empty") as empty:  # the seed skipped an entry here
            assert empty.position == term.token + 1
        first = await term.append(b"first")
        async with term.checkpoint() as pending:
            assert pending.position == term.position
            late = asyncio.create_task(after_a_moment(term))
            with pytest.raises(ConfigError, match="within the block of a checkpoint"):
                await term.append(b"no")
            with pytest.raises(ConfigError, match="within the block of a checkpoint"):
                async with term.checkpoint():
                    pass
        with pytest.raises(RuntimeError, match="the disk is full"):
            async with term.checkpoint():
                raise RuntimeError("the disk is full")
        async with term.checkpoint("copy", at=first):
            during = await term.append(b"during")
        with pytest.raises(ConfigError, match="a checkpoint at 1000: the journal is known up to"):
            async with term.checkpoint(at=1_000):
                pass
        await late
    with pytest.raises(NotLeading):
        async with term.checkpoint():
            pass
    # Right after a take-over the seed's pointed back to the start.
    async with journal.lead() as second, second.checkpoint() as fresh:
        assert fresh.position == second.token + 1
    items = await all_of(journal)
    found = [item for item in items if isinstance(item, JournalCheckpoint)]
    assert [(each.name, each.covers) for each in found] == [
        ("empty", empty.position),
        ("", pending.position),
        ("copy", first),
        ("", fresh.position),
    ]
    assert pending.entry_position == found[1].position
    assert pending.position >= first
    assert found[2].offset > during - 1
    covered = [item.event for item in items if isinstance(item, JournalEntry) and item.offset < pending.position]
    assert covered == [b"first"]
    assert set(events_of(items)) == {b"first", b"after", b"during"}


async def after_a_moment(term: Any) -> None:
    await asyncio.get_running_loop().create_task(term.append(b"after"), context=Context())


@pytest.mark.nightly
async def test_a_topic_that_takes_small_batches_costs_no_term(kafka_broker: BrokerAddress, journal: Journal) -> None:
    """Entries that are written together, and an append of several, are more than one batch there."""
    await journal.create()
    alter(kafka_broker.bootstrap_servers, journal.name, {"max.message.bytes": "60000"})
    async with journal.lead(is_strict=True) as term:
        appends = [term.submit(b"%d" % number + b"-" * 20_000) for number in range(40)]
        appends.append(term.submit(*[b"x" + b"-" * 20_000] * 6))
        positions = [await appending for appending in appends]
    found = [item for item in await all_of(journal) if isinstance(item, JournalEntry)]
    assert [item.event.rstrip(b"-") for item in found] == [*(b"%d" % number for number in range(40)), *[b"x"] * 6]
    assert [item.position for item in found][:40] == positions[:40]
    assert found[-1].position == positions[-1]


async def test_a_leader_whose_claim_was_taken_is_refused_and_its_block_is_cancelled(journal: Journal) -> None:
    """A second leader by a group that lost its memory: the first one's append is refused, its entry is nowhere."""
    await journal.create()
    answers: list[Any] = []

    async def first() -> None:
        async with journal.lead() as term:
            await term.append(b"mine")
            begun.set()
            await taken.wait()
            try:
                answers.append(await term.append(b"late"))
            except NotLeading as error:
                answers.append(error)
                raise

    begun, taken = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(first())
    await begun.wait()
    await usurp(journal)
    taken.set()
    with pytest.raises(NotLeading):
        await running
    items = await all_of(journal)
    assert [type(item).__name__ for item in items][-1] == "TermBegan"
    assert events_of(items) == [b"mine"]
    assert not any(isinstance(answer, int) for answer in answers)


async def usurp(journal: Journal) -> None:
    """Begin a term without the group."""

    def begin() -> None:
        with journal.claim() as claim:
            tenure: Any = SimpleNamespace(is_over=False, is_confirmed=lambda: True, reason="")
            TermWriter(claim, tenure).begin()

    await asyncio.to_thread(begin)


@pytest.mark.nightly
async def test_what_does_not_fit_is_an_error_with_numbers(
    kafka_broker: BrokerAddress, topic_prefix: str, journal: Journal, admin: TopicAdmin, settings: ClientSettings
) -> None:
    for bad in ("", "a b", "x" * 201):
        with pytest.raises(ConfigError, match="the name of a journal is"):
            Journal(bad, bootstrap_servers="x:1")
    with pytest.raises(ConfigError, match="min_insync_replicas is 2; it must be from 1 to replication_factor, which"):
        Journal("x", bootstrap_servers="x:1", replication_factor=1)
    with pytest.raises(ConfigError, match=r"isolation\.level"):
        Journal("x", bootstrap_servers="x:1", client_settings={"isolation.level": "read_uncommitted"})
    with pytest.raises(TopicError, match=r"does not exist: `await journal\.create"):
        await all_of(journal)
    unsafe = topic_prefix + "unsafe"
    week = {"retention.ms": "604800000"}
    admin.create([TopicSpec(name=unsafe, partitions=2, replication_factor=1, configs=week)])
    with pytest.raises(TopicError, match=r"has 2 partitions, settings say 1; .* retention\.ms=604800000, settings say"):
        async with journal_of(kafka_broker, unsafe).lead():
            pass
    await journal.create()
    topic = await journal.check()
    with pytest.raises(TopicReplaced, match="it was recreated, or another cluster answers"):
        async with journal.reader(after=0, topic_id="another"):
            pass
    with pytest.raises(OffsetError, match=r"position 7 is not in .*, which has 0 to 0: the log has lost entries"):
        async with journal.reader(after=7, topic_id=topic.topic_id):
            pass


@pytest.mark.nightly
async def test_a_reader_never_passes_over_entries_that_were_deleted(journal: Journal, settings: ClientSettings) -> None:
    """Neither at its start, nor on its way, nor where the topic is another one. The seed logged it, and went on."""
    await journal.create()
    async with journal.lead() as term:
        positions = [await term.append(b"%d" % number) for number in range(5)]
        topic = await journal.check()
        truncate(settings, journal.name, 0, positions[2])
        with pytest.raises(
            OffsetError, match=rf"begins at {positions[2]}: entries before it were trimmed. Load a snap"
        ):
            await all_of(journal)
        with pytest.raises(OffsetError, match=rf"position {positions[0]} is not in .*, which has {positions[2]} to"):
            await all_of(journal, positions[0])
        assert events_of(await all_of(journal, positions[2])) == [b"3", b"4"]
        async with journal.reader(after=positions[3], topic_id=topic.topic_id) as reader:
            last = await term.append(b"last")
            truncate(settings, journal.name, 0, last)
            with pytest.raises(OffsetError, match=rf"offset {positions[3]} is not in the log"):
                await gather(reader, [])


def lose(log: SyncJournal) -> None:
    with log.lead() as term:
        term.append(b"mine")
        asyncio.run(usurp(log.journal))
        with pytest.raises(NotLeading):
            term.append(b"late")
        assert term.is_over


@pytest.mark.nightly
def test_a_program_without_an_event_loop_appends_and_reads(journal: Journal) -> None:
    journal.create_now()
    with SyncJournal(journal) as log, log.reader() as reader:
        with log.lead() as term:
            with ThreadPoolExecutor(8) as threads:
                positions = list(threads.map(lambda number: term.append(b"%d" % number), range(20)))
            term.barrier()
            with term.checkpoint("x") as pending:
                assert pending.position == term.position
            assert not term.is_over
        found = list(reader.catch_up())
        assert sorted(item.position for item in found if isinstance(item, JournalEntry)) == sorted(positions)
        assert sum(isinstance(item, JournalCheckpoint) for item in found) == 1
        with pytest.raises(NotLeading, match="has begun"):
            lose(log)
        assert [entry.event for entry in reader.catch_up() if isinstance(entry, JournalEntry)] == [b"mine"]
