"""Elections on a real broker: candidates that are killed, frozen and cut off. Oracle: a file with a fence."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams import Election, ElectionTerm, NotLeading
from streams.broker.kafka_broker import KafkaBroker
from streams.election import ElectionEvent, LeaderAcquired, LeaderRevoked
from streams.errors import ConfigError, TopicError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import start_program, wait_until
from tests.unit.waiting import until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

SESSION = 3.0


class Candidate:
    """A process of ``election_program.py``."""

    def __init__(self, name: str, servers: str, folder: Path, number: int) -> None:
        self.log = folder / f"candidate-{number}.log"
        program = Path(__file__).with_name("election_program.py")
        self.process = start_program(self.log, program, name, servers, folder / "lines", str(SESSION))

    @property
    def tokens(self) -> list[int]:
        return [int(token) for token in re.findall(r"LeaderAcquired\(token=(\d+)\)", self.log.read_text())]

    def leads(self, terms: int = 1) -> None:
        wait_until(lambda: len(self.tokens) >= terms, f"it leads: {self.log.read_text()}", 60)

    def end(self) -> int:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        return self.process.wait(30)


class Race:
    """Candidates of one election, and the file that they write."""

    def __init__(self, name: str, servers: str, folder: Path) -> None:
        self.name, self.servers, self.folder = name, servers, folder
        self.candidates: list[Candidate] = []

    def start(self) -> Candidate:
        self.candidates.append(one := Candidate(self.name, self.servers, self.folder, len(self.candidates)))
        return one

    @property
    def lines(self) -> list[tuple[int, int]]:
        """Token and process of each write that was taken."""
        text = (self.folder / "lines").read_text()
        return [(int(line.split()[0]), int(line.split()[1])) for line in text.splitlines()]

    def check(self, terms: int) -> None:
        """Each term belongs to one process, and wrote; no line of a term stands behind one of a later term."""
        lines = self.lines
        assert [token for token, _ in lines] == sorted(token for token, _ in lines)
        assert len(set(lines)) == len({token for token, _ in lines}) >= terms
        acquired = [token for candidate in self.candidates for token in candidate.tokens]
        assert len(acquired) == len(set(acquired))
        assert {token for token, _ in lines} <= set(acquired)

    def close(self) -> None:
        for candidate in self.candidates:
            candidate.process.kill()
            candidate.process.wait()


@pytest.fixture
def race(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[Race]:
    race = Race(topic_prefix + "race", kafka_broker.bootstrap_servers, tmp_path)
    yield race
    race.close()


def test_a_leader_that_is_killed_is_replaced_within_its_session(race: Race) -> None:
    first = race.start()
    first.leads()
    second = race.start()
    wait_until(lambda: len(race.lines) > 20, "it works")
    assert second.tokens == []
    first.process.kill()
    killed = time.monotonic()
    second.leads()
    assert time.monotonic() - killed < SESSION + 15  # on a busy machine; a session and a moment on a quiet one
    wait_until(lambda: race.lines[-1][1] == second.process.pid, "the second works")
    assert second.end() == 0
    race.check(2)


def test_a_leader_that_is_frozen_ends_its_term_when_it_thaws(race: Race) -> None:
    first = race.start()
    first.leads()
    wait_until(lambda: len(race.lines) > 5, "it works")
    second = race.start()
    first.process.send_signal(signal.SIGSTOP)
    second.leads()
    first.process.send_signal(signal.SIGCONT)
    wait_until(lambda: "LeaderRevoked" in first.log.read_text(), "the first notices")
    assert f"the term {first.tokens[0]} is over: " in first.log.read_text()
    assert second.end() == 0
    first.leads(2)
    assert first.tokens[0] < second.tokens[0] < first.tokens[1]
    assert first.end() == 0
    race.check(2)


def test_terms_go_on_behind_a_broker_that_is_killed(broker: KafkaBroker, topic_prefix: str, tmp_path: Path) -> None:
    race = Race(topic_prefix + "race", broker.bootstrap_servers, tmp_path)
    try:
        first, second = race.start(), race.start()
        wait_until(lambda: bool(first.tokens or second.tokens), "one leads", 60)
        leader = first if first.tokens else second
        broker.kill()
        # Cut off, it cannot know whether another one leads.
        wait_until(lambda: "has not confirmed it for 3 seconds" in leader.log.read_text(), "its term ends")
        broker.restart()
        wait_until(lambda: len(first.tokens + second.tokens) > 1, "a term begins", 90)
        written = len(race.lines)
        wait_until(lambda: len(race.lines) > written, "it works")
        race.check(2)
    finally:
        race.close()


async def test_one_that_closes_hands_over_at_once(kafka_broker: BrokerAddress, topic_prefix: str) -> None:
    events: list[tuple[int, ElectionEvent]] = []
    tokens: list[int] = []
    let_go = [asyncio.Event(), asyncio.Event()]

    async def stand(number: int, servers: str) -> None:
        async with Election(topic_prefix + "duty", bootstrap_servers=servers, session_seconds=30.0) as election:
            election.on_event(lambda event: events.append((number, event)))
            async with election.term() as term:
                tokens.append(term.token)
                await let_go[number].wait()
            async with election.term() as term:  # it is still elected
                tokens.append(term.token)

    first = asyncio.create_task(stand(0, kafka_broker.bootstrap_servers))
    await until(lambda: len(tokens) == 1, "the first leads")
    second = asyncio.create_task(stand(1, kafka_broker.bootstrap_servers))
    let_go[1].set()
    let_go[0].set()
    await first
    closed = time.monotonic()
    await until(lambda: len(tokens) == 4, "the second leads")
    assert time.monotonic() - closed < 25  # its session is longer
    await second
    assert tokens == sorted(set(tokens))
    assert events[:2] == [(0, LeaderAcquired(tokens[0])), (0, LeaderRevoked(tokens[0], ""))]
    assert [number for number, _ in events] == [0, 0, 0, 0, 1, 1, 1, 1]


async def test_a_block_is_cancelled_when_the_group_takes_the_term_away(
    kafka_broker: BrokerAddress, topic_prefix: str
) -> None:
    seen: list[ElectionTerm] = []

    async def lead(election: Election) -> None:
        async with election.term() as term:
            with pytest.raises(ConfigError, match="one at a time"):
                await election.term().__aenter__()
            group = election._candidate.group
            await asyncio.to_thread(group.remove_member, group.member_id, 10.0)
            try:
                await asyncio.Event().wait()
            finally:
                assert term.is_over
                seen.append(term)

    async with Election(topic_prefix + "x", bootstrap_servers=kafka_broker.bootstrap_servers) as election:
        with pytest.raises(NotLeading, match=r"-x: the term \d+ is over: the group lost this process"):
            await lead(election)
        async with election.term() as again:  # it has joined again
            assert again.token > seen[0].token


async def test_what_cannot_work_is_an_error(
    kafka_broker: BrokerAddress, topic_prefix: str, admin: TopicAdmin, settings: ClientSettings
) -> None:
    servers = kafka_broker.bootstrap_servers
    for name in ("", "a b", "x" * 201):
        with pytest.raises(ConfigError, match="the name of an election is"):
            Election(name, bootstrap_servers=servers)
    with pytest.raises(ConfigError, match=r"session_seconds is 0\.5"):
        Election("x", bootstrap_servers=servers, session_seconds=0.5)
    admin.create([TopicSpec(name=f"{topic_prefix}y.election", partitions=2, replication_factor=1)])
    with pytest.raises(TopicError, match="must have one partition"):
        async with Election(topic_prefix + "y", bootstrap_servers=servers):
            pass
