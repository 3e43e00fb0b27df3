"""Battery T2 with a durable job per deposit, which calls a real receiver: SIGKILL at every step of a job, and a frozen
owner.

Each deposit is called for once or more, always with one id, which is no other deposit's; never before it is committed;
and its result is there once.
"""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from streams.cli.state_sources import jobs_of
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.reading.reader import PartitionReader
from streams.model.topics import TopicSpec
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from streams.testing.fixtures import BrokerAddress
from tests.broker.bank_jobs import STEPS, Told, told_of
from tests.broker.battery_kit import ENDLESS, PATIENCE, QUICK, Bank, wait_until
from tests.broker.gate import nightly
from tests.broker.test_battery_parked import KEYS, TRANSACTION, ParkedBank, dies

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

EACH = tuple((step, point) for step in STEPS for point in ("", *TRANSACTION))
CHEAP = (("started", "commit.before"), ("call answered", ""), ("ended", "flush.after"))


class Receiver:
    """An HTTP service that fails one call in ten and answers one in thirty too late, all of them while it is ``down``.
    ``calls``: the ids by the places of the deposits, in the order of the calls."""

    def __init__(self, seed: int) -> None:
        self.calls: dict[str, list[str]] = defaultdict(list)
        self.down = False
        self._lock, self._rng, self._closed = threading.Lock(), random.Random(seed), threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                place = self.rfile.read(size).decode()
                if len(place) < size:  # its sender has died
                    self.close_connection = True
                    return
                with receiver._lock:
                    receiver.calls[place].append(self.headers["Idempotency-Key"])
                    chance = receiver._rng.random()
                if chance < 0.03:
                    receiver._closed.wait(1.5)  # the service hangs
                self.send_response(503 if receiver.down or chance < 0.13 else 204)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None: ...  # who called is dead

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def places(self) -> dict[int, int]:
        """The highest offset that was called for, by partition."""
        with self._lock:
            found = [place.partition("@") for place in self.calls]
        highest: dict[int, int] = defaultdict(int)
        for number, _, offset in found:
            highest[int(number)] = max(highest[int(number)], int(offset))
        return highest

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class JobsBank(ParkedBank):
    """A bank with a job per deposit. Nothing is parked."""

    _oracle = Bank._oracle

    def __init__(self, bootstrap: str, group: str, folder: Path, receiver: Receiver) -> None:
        super().__init__(bootstrap, group, folder)
        self.receiver = receiver
        self.settings = {**QUICK, "BANK_HOOKS": receiver.url}
        admin = TopicAdmin(self._settings)
        try:
            admin.create([TopicSpec(name=told_of(self.group), partitions=1, replication_factor=1)], 30.0)
        finally:
            admin.close()

    def waiting(self) -> int:
        """Jobs that are not over, by the changelog."""
        return sum(len(jobs_of(number, entries).by_name) for number, entries in enumerate(self.entries()))

    def wait_over(self) -> None:
        """Wait until all jobs are over: as long as it takes, if only one after another is."""
        left = self.waiting()

        def is_less() -> bool:
            nonlocal left
            before, left = left, self.waiting()
            return left < before

        while left:  # now and then: the receiver is in this process, and each look reads everything
            wait_until(is_less, f"one of {left} jobs is over", step=1.0)

    def check_no_call_is_early(self) -> None:
        """No call is for a deposit that is not committed. Markers may come a moment after a member has been told so."""

        def is_settled() -> bool:
            with GroupChecks(self.source.config.resolved(), seconds=30.0) as checks:
                found = checks.last_records(self.source.config.changelog, list(range(self.partitions)), OFFSET_KEY)
            at = {number: decode_offset(record).offset for number, record in found.items()}
            return all(offset < at.get(number, 0) for number, offset in places.items())

        places = self.receiver.places()
        wait_until(is_settled, f"all that was called for, up to {places}, is committed", 20.0)

    def told(self) -> list[Told]:
        """The ends of all jobs."""
        admin, reader = TopicAdmin(self._settings), PartitionReader(self._settings)
        try:
            spans = {number: (mark.start, mark.end) for number, mark in admin.watermarks(told_of(self.group)).items()}
            found = reader.read_all(told_of(self.group), spans, stalled_after_seconds=PATIENCE)
            [records] = found.values()
            return [msgspec.json.decode(record.value or b"", type=Told) for record in records]
        finally:
            reader.close()
            admin.close()

    def end(self) -> None:
        """Have all jobs done, and count."""
        self.receiver.down = False
        self.wait_handled()
        self.wait_over()
        self.check_stores()
        self.must_be_exact()
        wait_until(lambda: len(self.told()) >= self.produced, "the last markers are in the topic of the ends", step=0.1)
        told = self.told()
        assert len(told) == self.produced
        assert {end.answer for end in told} == {204}
        ids = {end.place: end.id for end in told}
        assert len(ids) == len(set(ids.values())) == self.produced, "each place has one end, and an id of its own"
        assert {place: set(calls) for place, calls in self.receiver.calls.items()} == {
            place: {name} for place, name in ids.items()
        }
        print(f"{self.produced} jobs, {sum(map(len, self.receiver.calls.values()))} calls")
        print("calls of one job:", sorted(Counter(map(len, self.receiver.calls.values())).items()))


@pytest.fixture
def receiver(seed: int) -> Iterator[Receiver]:
    made = Receiver(seed)
    yield made
    made.close()


@pytest.fixture
def jobs_bank(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path, receiver: Receiver) -> Iterator[JobsBank]:
    made = JobsBank(kafka_broker.bootstrap_servers, f"{topic_prefix}bank", tmp_path, receiver)
    yield made
    made.close()


@pytest.mark.parametrize(
    "points", [pytest.param(CHEAP, id="three"), pytest.param(EACH, id="all", marks=pytest.mark.nightly)]
)
def test_killed_at_steps_of_jobs(
    jobs_bank: JobsBank, tmp_path: Path, points: Sequence[tuple[str, str]], seed: int
) -> None:
    """The only member dies at one after another, under load. Then jobs are the same wherever they are kept."""
    rng, folder, snapshots = random.Random(seed), tmp_path / "state", tmp_path / "snapshots"
    settings = {**jobs_bank.settings, "BANK_FOLDER": str(folder), "BANK_SNAPSHOTS": str(snapshots)}
    load = jobs_bank.load(ENDLESS, KEYS, seed, 10)
    for step, point in rng.sample(points, len(points)):
        passage, first = f"{step}:{rng.randrange(1, 30)}", f"{point}:1" if point else ""
        dies(jobs_bank.start("victim", **settings, BANK_STEP=passage, KES_FAULT=first))
        print(f"killed at {passage} {first}: {jobs_bank.handled()} handled")
        jobs_bank.check_no_call_is_early()
    jobs_bank.receiver.down = True
    last = jobs_bank.start("victim", **settings)
    jobs_bank.wait_progress(100)
    load.stop()
    jobs_bank.wait_handled()
    wait_until(
        lambda: len({path.parent for path in snapshots.rglob("manifest-*")}) == jobs_bank.partitions, "snapshots"
    )
    assert last.stop() == 0, last.last_words()
    changelog = jobs_bank.entries()
    assert jobs_bank.waiting() >= 50
    assert jobs_bank.entries(f"folder:{folder}") == changelog
    assert jobs_bank.entries(f"snapshots:{snapshots}") == changelog
    jobs_bank.start("victim", **settings)
    jobs_bank.end()


@pytest.mark.parametrize(
    ("step", "point"),
    [nightly("call answered", ""), nightly("ended", "commit.before"), nightly("ended", "flush.before")],
)
def test_an_owner_stands_still_while_another_one_runs_its_jobs(
    jobs_bank: JobsBank, step: str, point: str, seed: int
) -> None:
    """Awake again, it may end nothing that is not its own any more: two calls may be, two results never."""
    load = jobs_bank.load(ENDLESS, KEYS, seed, 30)
    owner = jobs_bank.start("frozen", **jobs_bank.settings, BANK_STEP=f"{step}:20", KES_FAULT=f"{point}:1:freeze")
    process = psutil.Process(owner.process.pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the owner stands still")
    other = jobs_bank.start("other", **jobs_bank.settings)
    wait_until(lambda: other.works_on() == jobs_bank.partitions, "the other one has everything")
    load.stop()
    jobs_bank.wait_handled()
    jobs_bank.wait_over()
    owner.signal(signal.SIGCONT)
    wait_until(lambda: owner.works_on() > 0 and other.works_on() > 0, "the two share the group again")
    jobs_bank.deposit(200, KEYS, seed + 1)
    jobs_bank.end()
