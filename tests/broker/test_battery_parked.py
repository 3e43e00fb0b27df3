"""Battery T2 with a tenth of the keys parked: SIGKILL at every step of parking, frozen owners, an operator's acts.

The oracle is that of the battery. A fold knows nothing of queues: of a key's events each took effect once, in the order
of the input, or is a dead letter that an operator wanted.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from streams import EventSource, QueryConfig, Table
from streams.cli.state_sources import parked_of, read_on, state_of
from streams.core.parking_rules import Action
from streams.errors import NotOwned
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.reader import PartitionReader
from streams.records import IncomingRecord
from streams.runtime.queries.parked import ParkedQueue
from streams.testing.fixtures import BrokerAddress
from streams.testing.oracle import ReplayOracle, Sent, State
from tests.broker import bank, bank_parked
from tests.broker.battery_kit import ENDLESS, PATIENCE, QUICK, Bank, Worker, wait_until
from tests.broker.engine_kit import facts
from tests.broker.gate import nightly
from tests.unit.private_kit import private
from tests.vocabulary import config_of

from streams.queries.operating import ParkedClient  # isort: skip

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

KEYS = 50
TRANSACTION = ("flush.before", "flush.after", "commit.before", "commit.after")
AT_A_TURN = ("failed", "queued", "noted", "tried", "failed again", "left", "opened")
EACH = tuple((step, point) for step in AT_A_TURN for point in ("", *TRANSACTION))
AHEAD = tuple(("begun ahead", point) for point in ("", "handler.before", *TRANSACTION))
CHEAP = (("left", "commit.before"), ("opened", "flush.after"))


class ParkedBank(Bank):
    """A bank whose keys are parked."""

    def __init__(self, bootstrap: str, group: str, folder: Path) -> None:
        super().__init__(bootstrap, group, folder)
        self.settings = {**QUICK, "BANK_PARK": str(self.folder / "broken")}
        self.secret = private(self.folder / "secret", "the secret of this group")
        self.source: EventSource[Any] = EventSource(
            config_of(
                group_id=self.group,
                topic=bank.topic_of(self.group),
                bootstrap_servers=self.bootstrap,
                num_partitions=self.partitions,
                queries=QueryConfig(secret_file=str(self.secret)),
            ),
            Table.factory(key=str, value=bank.Account),
        )

    def broken(self, is_broken: bool) -> None:
        """Have all events of the bad accounts fail, or be repaired."""
        (self.folder / "broken").touch()
        if not is_broken:
            (self.folder / "broken").unlink()

    def entries(self, side: str = "changelog") -> list[dict[bytes, bytes]]:
        """The state of each partition, queues and all; that of a folder, or of snapshots, as it is read on from."""
        states = state_of(self.source, side, self.bootstrap, 60.0, None)
        if side != "changelog":
            [states] = read_on(self.source, [states], self.bootstrap, 60.0)
        return [states[number].entries for number in sorted(states)]

    def parked_keys(self) -> list[int]:
        """How many keys of each partition are parked."""
        return [len(parked_of(number, entries).keys.by_name) for number, entries in enumerate(self.entries())]

    def work_off(self) -> None:
        """Have everything repaired, handled, and compared."""
        self.broken(False)
        self.wait_handled()
        wait_until(lambda: not any(self.parked_keys()), "the queues are empty")
        self.check_stores()
        self.must_be_exact()

    def letters(self) -> list[IncomingRecord]:
        """Return the events that operators have let go."""
        admin, reader = TopicAdmin(self._settings), PartitionReader(self._settings)
        try:
            topic = self.source.config.dead_letters
            marks = admin.watermarks(topic)
            spans = {number: (mark.start, mark.end) for number, mark in marks.items()}
            found = reader.read_all(topic, spans, stalled_after_seconds=PATIENCE)
            return [record for records in found.values() for record in records]
        finally:
            reader.close()
            admin.close()

    def _oracle(self) -> ReplayOracle:
        gone = {(int(found["partition"]), int(found["offset"])) for found in map(facts, self.letters())}
        fold = bank.fold(self.group, self._store)

        def without_letters(state: State, record: IncomingRecord) -> Iterator[Sent]:
            if (record.partition, record.offset) not in gone:
                yield from fold(state, record)

        return ReplayOracle(
            self.bootstrap,
            group_id=self.group,
            topic=bank.topic_of(self.group),
            outputs=[bank.output_of(self.group)],
            fold=without_letters,
        )


@pytest.fixture
def parked_bank(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[ParkedBank]:
    """A bank with queues."""
    assert sum(bank_parked.is_bad(f"account-{number}") for number in range(KEYS)) >= 3
    made = ParkedBank(kafka_broker.bootstrap_servers, f"{topic_prefix}bank", tmp_path)
    yield made
    made.close()


def dies(worker: Worker) -> None:
    wait_until(lambda: not worker.running, f"{worker.instance} dies")
    assert worker.process.returncode == -signal.SIGKILL, worker.last_words()


@pytest.mark.parametrize(
    ("handler", "points"),
    [
        pytest.param("plain", CHEAP, id="two"),
        pytest.param("plain", EACH, id="all", marks=pytest.mark.nightly),
        pytest.param("turn", EACH + AHEAD, id="concurrent", marks=pytest.mark.nightly),
        pytest.param("job", EACH + AHEAD, id="jobs", marks=pytest.mark.nightly),
    ],
)
def test_killed_at_steps_of_parking(
    parked_bank: ParkedBank, tmp_path: Path, handler: str, points: Sequence[tuple[str, str]], seed: int
) -> None:
    """The only member dies at one after another, under load. Then queues are the same wherever they are kept."""
    rng, folder, snapshots = random.Random(seed), tmp_path / "state", tmp_path / "snapshots"
    kept = {"BANK_FOLDER": str(folder), "BANK_SNAPSHOTS": str(snapshots)}
    settings = {**parked_bank.settings, **kept, "BANK_HANDLER": handler, "BANK_JOB_MS": "20"}
    # Work ahead takes up to 20 ms for each first event of a queue. What comes in while a member dies and starts queues
    # behind them: more of it, and a queue that is to be empty is not within the patience on a machine that is slow.
    load = parked_bank.load(ENDLESS, KEYS, seed, 150 if handler == "plain" else 30)
    for step, point in rng.sample(points, len(points)):
        # While all is broken, keys that are parked already fail for the first time no more, and none opens.
        parked_bank.broken(step not in ("failed", "left", "opened") and rng.random() < 0.25)
        passage, first = f"{step}:{rng.randrange(1, 4)}", f"{point}:1" if point else ""
        dies(parked_bank.start("victim", **settings, BANK_STEP=passage, KES_FAULT=first))
        print(f"killed at {passage} {first}: {parked_bank.handled()} of {parked_bank.produced} handled")
    parked_bank.broken(True)
    last = parked_bank.start("victim", **settings)
    parked_bank.wait_progress(200)
    load.stop()
    parked_bank.wait_handled()
    manifests = snapshots.rglob
    wait_until(
        lambda: len({path.parent for path in manifests("manifest-*")}) == parked_bank.partitions, "each has a snapshot"
    )
    assert last.stop() == 0, last.last_words()
    changelog = parked_bank.entries()
    assert any(parked_bank.parked_keys())
    assert parked_bank.entries(f"folder:{folder}") == changelog
    assert parked_bank.entries(f"snapshots:{snapshots}") == changelog
    parked_bank.start("victim", **settings)
    parked_bank.work_off()


@pytest.mark.parametrize(
    ("handler", "step", "point"),
    [
        nightly("plain", "noted", "commit.before"),
        nightly("plain", "tried", ""),
        nightly("plain", "left", "commit.before"),
        nightly("plain", "left", "flush.before"),
        nightly("plain", "opened", "commit.before"),
        nightly("turn", "begun ahead", "commit.before"),
        nightly("job", "begun ahead", ""),
    ],
)
def test_an_owner_stands_still_while_another_one_works_off_its_heads(
    parked_bank: ParkedBank, handler: str, step: str, point: str, seed: int
) -> None:
    """With a head under way; awake again, it may do nothing for what is not its own any more."""
    group, settings = parked_bank, {**parked_bank.settings, "BANK_HANDLER": handler, "BANK_JOB_MS": "20"}
    load = group.load(ENDLESS, KEYS, seed, 300)
    owner = group.start("frozen", **settings, BANK_STEP=f"{step}:3", KES_FAULT=f"{point}:1:freeze")
    process = psutil.Process(owner.process.pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the owner stands still")
    before = group.parked_keys()
    other = group.start("other", **settings)
    wait_until(lambda: other.works_on() == group.partitions, "the other one has everything")
    load.stop()
    group.wait_handled()
    wait_until(lambda: not any(group.parked_keys()), f"the other one has worked off all, {before} when it came")
    owner.signal(signal.SIGCONT)
    wait_until(lambda: owner.works_on() > 0 and other.works_on() > 0, "the two share the group again")
    group.deposit(200, KEYS, seed + 1)
    group.work_off()


@pytest.mark.parametrize(
    ("action", "point"),
    [nightly(action, point) for action in ("skip-head", "drop") for point in ("", *TRANSACTION)],
)
def test_an_owner_dies_while_it_answers_an_operator(
    parked_bank: ParkedBank, action: Action, point: str, seed: int
) -> None:
    """The request is put again to the next owner: what the operator named goes once, and nothing else."""
    group, settings = parked_bank, {**parked_bank.settings, "BANK_SECRET": str(parked_bank.secret)}
    group.broken(True)
    fault = {"BANK_STEP": "operated:1", "KES_FAULT": f"{point}:1" if point else ""}
    owner = group.start("owner", **settings, **fault)
    group.deposit(1_000, KEYS, seed)
    group.wait_handled()

    async def operate() -> ParkedQueue:
        async with ParkedClient(group.source.config) as client:
            found = await client.find(30.0)
            number, queue = next((number, each) for number, each in found if each.next - each.head > 1)
            acting = asyncio.create_task(
                client.act(number, action, [queue.named], as_letters=True, timeout_seconds=60.0)
            )
            await asyncio.to_thread(dies, owner)
            group.start("next", **settings)
            try:
                done = await acting
            except NotOwned:
                done = await client.act(number, action, [queue.named], as_letters=True, timeout_seconds=60.0)
            print(f"killed at {point or 'the act'}: {'done by the next owner' if done else 'done before'}")
            assert not await client.act(number, action, [queue.named], as_letters=True, timeout_seconds=60.0)
            return queue

    queue = asyncio.run(operate())
    gone = [facts(letter)["offset"] for letter in group.letters()]
    assert len(gone) == len(set(gone)) == (1 if action == "skip-head" else queue.next - queue.head)
    group.deposit(200, KEYS, seed + 1)
    group.work_off()
