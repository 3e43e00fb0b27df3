"""A journal whose requests, or their answers, are lost, late or doubled; and whose broker is killed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from streams.broker.kafka_broker import KafkaBroker
from streams.errors import NotLeading, TransactionFailed
from streams.journal import Journal, JournalEntry, JournalTerm
from streams.journal import journal as module
from streams.testing.faults import KafkaProxy, Rule
from streams.testing.fixtures import BrokerAddress
from tests.broker.gate import gate
from tests.broker.test_battery_proxy import FAULTS
from tests.broker.test_journal import all_of, usurp

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(300)]


class Appends:
    """Appends of one process, over as many terms as it takes, and the answer to each."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.acknowledged: dict[int, int] = {}
        self.refused: set[int] = set()
        self.terms: list[int] = []
        self._next = 0

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Append without a pause while ``work`` runs."""
        leading = asyncio.create_task(self._lead())
        try:
            await work()
        finally:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)

    async def _lead(self) -> None:
        while True:
            with suppress(NotLeading):
                async with self.journal.lead() as term:
                    self.terms.append(term.token)
                    await asyncio.gather(*(self._append(term) for _ in range(3)))

    async def _append(self, term: JournalTerm) -> None:
        while True:
            number = self._next = self._next + 1
            appending = term.submit(b"%d" % number)
            asyncio.create_task(self._note(number, appending)).add_done_callback(lambda done: done.exception())
            await appending

    async def _note(self, number: int, appending: Any) -> None:
        """Learn the answer, also when the block is cancelled meanwhile."""
        try:
            self.acknowledged[number] = await appending
        except NotLeading:
            self.refused.add(number)

    async def more(self, count: int = 10) -> None:
        before = len(self.acknowledged)
        while len(self.acknowledged) < before + count:
            await asyncio.sleep(0.02)

    async def check(self, journal: Journal) -> None:
        """Each acknowledged one is there once, at its position; none that was refused is."""
        entries = [item for item in await all_of(journal) if isinstance(item, JournalEntry)]
        there = {int(entry.event): entry.position for entry in entries}
        assert len(there) == len(entries), "an entry is there twice"
        assert {number: there.get(number) for number in self.acknowledged} == self.acknowledged
        assert not self.refused & there.keys()
        assert self.terms == sorted(set(self.terms))


def journal_of(servers: str, name: str) -> Journal:
    return Journal(name, bootstrap_servers=servers, replication_factor=1, min_insync_replicas=1)


@pytest.mark.parametrize("api", gate(["EndTxn", "Produce", "InitProducerId"], "EndTxn"))
async def test_answers_that_are_lost_are_settled(
    api: str, kafka_broker: BrokerAddress, topic_prefix: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CLAIM_SECONDS", 4.0)
    rng, direct = random.Random(seed), journal_of(kafka_broker.bootstrap_servers, topic_prefix + "log")
    await direct.create()
    with KafkaProxy(kafka_broker.bootstrap_servers) as proxy:
        appends = Appends(journal_of(proxy.bootstrap_servers, direct.name))

        async def faults() -> None:
            await appends.more()
            for fault in FAULTS.values():
                armed = proxy.add(Rule(apis={api}, nth=rng.randrange(1, 4), times=1, seed=seed, **fault))
                async with asyncio.timeout(60):
                    while not await asyncio.to_thread(armed.wait_struck, seconds=0.5):
                        if api == "InitProducerId":  # another one takes the claim, past the proxy: it is taken back
                            with suppress(TransactionFailed):  # before the other one has begun its term
                                await usurp(direct)
                armed.remove()
                await appends.more()

        await appends.run(faults)
        assert sum(proxy.struck.values()) >= len(FAULTS)
    await appends.check(direct)


async def test_a_broker_that_is_killed_has_appends_wait_and_answers_stay_right(
    broker: KafkaBroker, topic_prefix: str
) -> None:
    journal = journal_of(broker.bootstrap_servers, topic_prefix + "log")
    await journal.create()
    appends = Appends(journal)

    async def kill() -> None:
        await appends.more()
        for _ in range(2):
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.restart)
            await appends.more()

    await appends.run(kill)
    await appends.check(journal)
