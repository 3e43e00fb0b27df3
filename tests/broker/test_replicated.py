"""Replicated services on a real broker: members that take over, and are equal wherever they can be compared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
import pytest

from streams import event_type
from streams.errors import NotLeading, OffsetError, RecordRefused, ReplicaFailed
from streams.journal import Journal, JournalCheckpoint, JournalEntry, Replicated, SnapshotFolder
from streams.kafka.settings import ClientSettings
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import let_pass
from tests.broker.client_kit import truncate
from tests.broker.test_journal import all_of, usurp
from tests.unit.waiting import until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@event_type("Moved")
class Moved(msgspec.Struct, frozen=True):
    source: str
    target: str
    cents: int


class Bank:
    """Accounts with a constant total; an account called ``broken`` cannot be used."""

    def __init__(self) -> None:
        self.accounts = {"a": 100, "b": 100}

    def apply(self, event: Moved) -> None:
        self.accounts[event.source] -= event.cents
        if event.target == "broken":
            raise ValueError("a bug")
        self.accounts[event.target] = self.accounts.get(event.target, 0) + event.cents

    def save(self, file: BinaryIO) -> None:
        file.write(msgspec.json.encode(self.accounts, order="sorted"))

    @classmethod
    def load(cls, file: BinaryIO) -> Self:
        bank = cls()
        bank.accounts = msgspec.json.decode(file.read())
        return bank


def move(source: str, target: str, cents: int) -> Callable[[Bank], tuple[list[Moved], int]]:
    return lambda bank: ([Moved(source, target, cents)], bank.accounts[source])


def accounts(bank: Bank) -> dict[str, int]:
    return dict(bank.accounts)


class Members:
    """Members of one service in this process, each with a folder of its own."""

    def __init__(self, broker: BrokerAddress, name: str, folder: Path) -> None:
        self._servers, self._name, self._folder = broker.bootstrap_servers, name, folder
        self.machine: type[Bank] = Bank
        self.session_seconds = 6.0

    def journal(self, **more: Any) -> Journal:
        settings = {"replication_factor": 1, "min_insync_replicas": 1, "session_seconds": self.session_seconds} | more
        return Journal(self._name, [Moved], bootstrap_servers=self._servers, **settings)

    def member(self, number: int, **more: Any) -> Replicated[Bank]:
        folder = SnapshotFolder(self._folder / str(number), keep=2)
        return Replicated(self.journal(), self.machine, snapshots=folder, address=f"member-{number}", **more)

    def snapshots(self, number: int) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self._folder / str(number)).glob("*.snapshot")}


@pytest.fixture
async def members(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Members:
    members = Members(kafka_broker, topic_prefix + "bank", tmp_path)
    await members.journal().create()
    return members


async def test_members_take_over_with_all_that_was_acknowledged_and_are_equal_at_checkpoints(members: Members) -> None:
    async with AsyncExitStack() as opened:
        first = await opened.enter_async_context(members.member(1, checkpoint_every=20))
        await until(lambda: first.is_leading, "the first leads")
        async with members.member(2, checkpoint_every=20) as second:
            replies = await asyncio.gather(*(first.decide(move("a", "b", 1)) for _ in range(50)))
            assert sorted(replies) == list(range(51, 101))  # each saw all before it
            assert await first.read(accounts) == {"a": 50, "b": 150}
            await until(lambda: bool(members.snapshots(1)), "a checkpoint is made")
            with pytest.raises(KeyError):
                await first.decide(move("nobody", "b", 1))
            with pytest.raises(RecordRefused, match="are taken; nothing of it is applied"):
                await first.decide(lambda bank: ([big()], None))
            while await second.read(accounts, barrier=False) != {"a": 50, "b": 150}:
                await asyncio.sleep(0.02)
            with pytest.raises(NotLeading, match="does not lead; member-1 may lead; nothing is appended"):
                await second.decide(move("a", "b", 1))
            with pytest.raises(NotLeading):
                await second.read(accounts)
            await until(lambda: members.snapshots(1) == members.snapshots(2), "the second saves at the same place")
            await first.decide(move("b", "a", 5))
            await opened.aclose()  # a planned stop
            await until(lambda: second.is_leading, "the second leads")
            assert await second.read(accounts) == {"a": 55, "b": 145}
            assert await second.decide(move("a", "b", 5)) == 55
            assert await second.lag() == 0
    one, two = members.snapshots(1), members.snapshots(2)
    assert one.keys() & two.keys()
    assert all(one[name] == two[name] for name in one.keys() & two.keys())
    items = await all_of(members.journal())
    assert sum(isinstance(item, JournalCheckpoint) for item in items) >= 1
    assert sum(isinstance(item, JournalEntry) for item in items) == 52
    async with members.member(1) as again:  # from its snapshot and the tail
        await until(lambda: again.is_leading, "it leads")
        assert await again.read(accounts) == {"a": 50, "b": 150}


def big() -> Moved:
    return Moved("a", "x" * 1_100_000, 0)


@pytest.mark.nightly
async def test_a_state_that_ran_ahead_and_lost_is_built_anew(members: Members) -> None:
    async with members.member(1) as member:
        await until(lambda: member.is_leading, "it leads")
        await member.decide(move("a", "b", 10))
        await usurp(member.journal)  # another one leads, and this one does not know it
        lost = await asyncio.gather(*(member.decide(move("a", "b", 1)) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(answer, NotLeading) for answer in lost)
        await until(lambda: member.is_leading, "it leads again")
        assert await member.read(accounts) == {"a": 90, "b": 110}


@pytest.mark.nightly
async def test_an_apply_that_raises_fails_its_decision_and_stops_a_replica_by_name(members: Members) -> None:
    async with members.member(1) as member:
        await until(lambda: member.is_leading, "it leads")
        with pytest.raises(ReplicaFailed, match=r"a decision for .*: Bank\.apply failed on Moved: ValueError"):
            await member.decide(move("a", "broken", 1))
        await until(lambda: member.is_leading, "it leads again, with a state without the half of it")
        assert await member.read(accounts) == {"a": 100, "b": 100}
    journal = members.journal()
    async with journal.lead() as term:
        position = await term.append(Moved("a", "broken", 1))
    with pytest.raises(ReplicaFailed, match=rf"\[0\]@{position - 1}: Bank\.apply failed on Moved"):
        async with members.member(2) as replica:
            await replica.wait()
    assert isinstance(replica.failure, ReplicaFailed)


class Prompting(Bank):
    """A bank whose saves and loads call what is named here, before they begin."""

    on_save: Callable[[], None] | None = None
    on_load: Callable[[], None] | None = None

    def save(self, file: BinaryIO) -> None:
        if Prompting.on_save is not None:
            Prompting.on_save()
        super().save(file)

    @classmethod
    def load(cls, file: BinaryIO) -> Self:
        if Prompting.on_load is not None:
            Prompting.on_load()
        return super().load(file)


@pytest.mark.nightly
async def test_a_leader_that_is_lost_between_its_state_and_the_entry_leaves_a_snapshot_that_is_right(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has a position of its own: no checkpoint has to be there."""
    monkeypatch.setattr(members, "machine", Prompting)
    async with members.member(1, checkpoint_every=5) as member:
        await until(lambda: member.is_leading, "it leads")
        monkeypatch.setattr(Prompting, "on_save", lambda: asyncio.run(usurp(member.journal)))
        with suppress(NotLeading):
            while True:
                await member.decide(move("a", "b", 1))
        monkeypatch.setattr(Prompting, "on_save", None)
        (name,) = members.snapshots(1)
    items = await all_of(members.journal())
    assert not any(isinstance(item, JournalCheckpoint) for item in items)
    moves = sum(isinstance(item, JournalEntry) for item in items)
    async with members.member(1) as again:
        assert again.position == int(name.partition(".")[0])
        await until(lambda: again.is_leading, "it leads")
        assert await again.read(accounts) == {"a": 100 - moves, "b": 100 + moves}


@pytest.mark.nightly
async def test_a_log_that_is_trimmed_while_a_replica_loads_stops_it_with_the_offsets(
    members: Members, settings: ClientSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has chosen its snapshot, and reads what is behind it only then."""
    monkeypatch.setattr(members, "machine", Prompting)
    async with members.member(1, checkpoint_every=1_000) as member:
        await until(lambda: member.is_leading, "it leads")
        await member.decide(move("a", "b", 1))
        assert member._term is not None
        await member._checkpoint(member._term)
        position = await member.decide(lambda bank: ([Moved("a", "b", 1)], None)) or member._term.position
    monkeypatch.setattr(Prompting, "on_load", lambda: truncate(settings, member.journal.name, 0, position))
    with pytest.raises(OffsetError, match=rf"which has {position} to .*: entries that are needed were trimmed"):
        async with members.member(1) as again:
            await again.wait()


@pytest.mark.nightly
async def test_a_decision_that_takes_longer_than_a_session_costs_the_term(members: Members) -> None:
    """The loop stands still: its heartbeats go on, but nobody has confirmed the term. The decision is committed if its
    append has begun before the term ends, and else refused; the member goes on."""
    members.session_seconds = 2.0
    async with members.member(1) as member:
        await until(lambda: member.is_leading, "it leads")
        first, cents = member._term, 1
        await member.decide(move("a", "b", 1))

        def ponder(bank: Bank) -> tuple[list[Moved], None]:
            let_pass(4 * members.session_seconds)
            return [Moved("a", "b", 10)], None

        try:
            await member.decide(ponder)
            cents += 10
        except NotLeading:
            pass
        await until(lambda: member.is_leading and member._term is not first, "it leads again")
        assert await member.read(accounts) == {"a": 100 - cents, "b": 100 + cents}
    events = [item.event for item in await all_of(members.journal()) if isinstance(item, JournalEntry)]
    assert sum(event.cents for event in events) == cents
