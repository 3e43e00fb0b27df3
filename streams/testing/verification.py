"""The verification of an event source: the same input undisturbed and under attack must leave the same behind.

Two throw-away brokers get the same records. On the first one a single worker handles them in peace. On the second one
several workers do, while workers are killed (SIGKILL) and frozen (SIGSTOP past their session, SIGCONT) at moments drawn
from a seed. Then everything that committed readers can see is compared: the sequence of outputs per topic and key, and
the last value per key of the changelog. Handlers have to be deterministic for that: the same input, the same output.
"""

from __future__ import annotations

import logging
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

import msgspec
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from streams.broker import KafkaBroker
from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import BrokerUnavailable
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.records import IncomingRecord, Record
from streams.runtime.changelog import TIMER_PREFIX
from streams.runtime.partition.parked_events import QUEUES
from streams.settings.config import EventSourceConfig
from streams.testing.trial_process import TrialFailed, WorkerProcess

_log = logging.getLogger(__name__)

Say = Callable[[str, int, int], None]
"""Called with the name of the work, how much of it is done, and how much there is (0: not known)."""
Sequences = dict[tuple[str, bytes | None], list[tuple[bytes | None, tuple[tuple[str, bytes | None], ...]]]]

POLL_SECONDS = 0.1
STATE = "state"
"""The folder in that of the trial for state on disk, which is never kept."""
SHOWN = 20
_UNKNOWN = re.compile(r"UNKNOWN_TOPIC_OR_PARTITION \(([\w.-]+):")
_BEYOND_SESSION = 2.0
_STOP_SECONDS = 60.0


class Attack(msgspec.Struct, frozen=True, kw_only=True):
    """Extent of the attack. ``patience_seconds``: without any progress for so long the trial has failed."""

    workers: int = 3
    kills: int = 5
    freezes: int = 2
    seed: int = 0
    patience_seconds: float = 90.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a trial. No ``differences``: exactly once, whatever happened. ``timers``: so many were not due when the
    input was handled, so what they lead to was not compared. ``logs``: the folder with the workers' logs, kept when
    something differs."""

    records: int
    outputs: int
    keys: int
    kills: int
    freezes: int
    seed: int
    seconds: float
    differences: tuple[str, ...]
    timers: int = 0
    logs: str = ""


class Left(msgspec.Struct):
    """Outputs and state that a run left behind, as committed readers see them."""

    outputs: Sequences
    letters: dict[tuple[bytes | None, bytes | None], int]
    state: dict[tuple[int, bytes], bytes]
    timers: int = 0
    """Set and not fired."""
    parked: frozenset[tuple[int, bytes, int]] = frozenset()
    """Queues of parked events: partition, name, number of records."""


class Trial:
    """One source, one input. Blocking; use it from the main thread, once.

    ``source``: ``module:name`` as ``kes run`` takes it, importable from the current folder; ``config``: its settings;
    ``records``: the input, with keys, headers and partitions (``None``: by key). ``outputs``: topics that it writes to
    with their numbers of partitions: a topic that is neither among them nor on the broker ends the trial. ``tables``:
    the topics of joined tables and lookups; ``rows``: the records of all of them, with topic and partition. Both runs
    have every row before the first event, and none later: so an event meets the same rows in both.
    """

    def __init__(
        self,
        source: str,
        config: EventSourceConfig,
        records: Sequence[Record],
        *,
        outputs: Mapping[str, int] | None = None,
        tables: Sequence[TopicSpec] = (),
        rows: Sequence[Record] = (),
        any_order: bool = False,
        say: Say = lambda *_: None,
    ) -> None:
        self._source, self._config, self._records = source, config, records
        self._outputs, self._any_order, self._say = outputs or {}, any_order, say
        self._tables, self._rows = tables, rows
        self._folder = Path()

    def run(self, attack: Attack) -> Verdict:
        """Run the whole trial. Raises ``TrialFailed`` when it does not come to its end, ``EmbeddedBrokerError``.

        The workers' logs stay when something differs or the trial fails, and go after success and after an interrupt.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="kes-verify-"))
        try:
            verdict = self._compared(attack)
        except TrialFailed:
            raise
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(self._folder / STATE, ignore_errors=True)
        if not verdict.differences:
            shutil.rmtree(self._folder, ignore_errors=True)
        return verdict

    def _compared(self, attack: Attack) -> Verdict:
        began = time.monotonic()
        expected = self._undisturbed(attack)
        seen, kills, freezes = self._attacked(attack)
        found = differences(expected, seen, any_order=self._any_order)
        return Verdict(
            records=len(self._records),
            outputs=sum(map(len, seen.outputs.values())),
            keys=len(seen.state),
            kills=kills,
            freezes=freezes,
            seed=attack.seed,
            seconds=time.monotonic() - began,
            differences=tuple(found[:SHOWN]),
            timers=max(expected.timers, seen.timers),
            logs=str(self._folder) if found else "",
        )

    def _undisturbed(self, attack: Attack) -> Left:
        with self._broker() as broker:
            site = self._site(broker)
            site.produce(self._records)
            state = self._folder / STATE / "undisturbed"
            worker = WorkerProcess(self._source, broker.bootstrap_servers, "undisturbed", self._folder, state)
            try:
                self._wait(site, [worker], "records handled, undisturbed", attack.patience_seconds)
                worker.stop(_STOP_SECONDS)
            finally:
                worker.kill()
            return site.left()

    def _attacked(self, attack: Attack) -> tuple[Left, int, int]:
        rng = random.Random(attack.seed)
        session = self._config.timeouts.session_timeout_seconds
        deeds = ["kill"] * attack.kills + ["freeze"] * attack.freezes
        rng.shuffle(deeds)
        with self._broker() as broker:
            site = self._site(broker)
            seconds = 2.0 * attack.kills + (session + 2 * _BEYOND_SESSION) * attack.freezes + 5.0
            rate = len(self._records) / seconds
            feeding = threading.Thread(target=site.produce, args=(self._records, rate), daemon=True)
            state = self._folder / STATE / "attacked"  # of all workers, as on one machine
            workers = [
                WorkerProcess(self._source, broker.bootstrap_servers, f"worker-{number}", self._folder, state)
                for number in range(attack.workers)
            ]
            try:
                self._wait_begun(site, workers, attack.patience_seconds, feeding)
                for number, deed in enumerate(deeds):
                    self._say("kills and freezes", number, len(deeds))
                    self._strike(rng, deed, workers, session)
                self._say("kills and freezes", len(deeds), len(deeds))
                feeding.join()
                self._wait(site, workers, "records handled, under attack", attack.patience_seconds)
                for worker in workers:
                    worker.stop(_STOP_SECONDS)
            finally:
                for worker in workers:
                    worker.kill()
            return site.left(), attack.kills, attack.freezes

    def _site(self, broker: KafkaBroker) -> Site:
        """Make the topics, and write the rows of tables: all of them are there before any worker starts."""
        site = Site(broker.bootstrap_servers, self._config, [spec.name for spec in self._tables])
        site.create(self._outputs, self._tables)
        site.produce(self._rows)
        return site

    def _strike(self, rng: random.Random, deed: str, workers: Sequence[WorkerProcess], session: float) -> None:
        for worker in workers:
            worker.again()
        time.sleep(rng.uniform(0.2, 2.0))  # the moment of the attack is what is drawn
        victim = rng.choice([worker for worker in workers if worker.runs] or list(workers))
        _log.info("%s: %s", victim.name, deed)
        if deed == "kill":
            victim.signal(signal.SIGKILL)
            victim.process.wait()
        else:
            victim.signal(signal.SIGSTOP)
            time.sleep(session + _BEYOND_SESSION)  # the session has to expire while it is frozen
            victim.signal(signal.SIGCONT)

    def _wait_begun(
        self, site: Site, workers: Sequence[WorkerProcess], patience: float, feeding: threading.Thread
    ) -> None:
        """Wait until the first record is handled: an attack on a worker that has not begun proves little."""
        feeding.start()
        deadline = time.monotonic() + patience
        while site.handled() == 0:
            self._check(site, workers, deadline, "nothing was handled")
            time.sleep(POLL_SECONDS)

    def _wait(self, site: Site, workers: Sequence[WorkerProcess], what: str, patience: float) -> None:
        handled, moved_at = -1, time.monotonic()
        while True:
            now = site.handled()
            self._say(what, max(now, 0), len(self._records))
            if now >= len(self._records):
                self._settle(site, patience)
                return
            if now != handled:
                handled, moved_at = now, time.monotonic()
            self._check(site, workers, moved_at + patience, f"{now} of {len(self._records)} records were handled")
            time.sleep(POLL_SECONDS)

    def _settle(self, site: Site, patience: float) -> None:
        """Wait until no event is parked, or the same ones are so long that further attempts have failed, too: what took
        effect is the same in both runs then."""
        calm = min(patience, 2 * self._config.parking.max_retry_seconds + _BEYOND_SESSION)
        there, since = site.parked(), time.monotonic()
        while there and time.monotonic() - since < calm:
            time.sleep(POLL_SECONDS)
            now = site.parked()
            if now != there:
                there, since = now, time.monotonic()

    def _check(self, site: Site, workers: Sequence[WorkerProcess], deadline: float, stand: str) -> None:
        for worker in workers:
            unknown = _UNKNOWN.findall(worker.tail)
            if unknown and site.lacks(unknown[-1]):  # it never comes to be on this broker, and they resend until then
                raise TrialFailed(
                    f"the handlers send to {unknown[-1]!r}, a topic that the trial's broker has not: declare it with "
                    f"source.output({unknown[-1]!r}), or name it with --output {unknown[-1]}:PARTITIONS; {worker.log}"
                )
        dead = [worker for worker in workers if not worker.runs]
        if dead and len(workers) == 1:
            raise TrialFailed(f"the source stopped by itself: {dead[0].last_words}; its log: {dead[0].log}")
        for worker in dead:
            worker.again()
        if time.monotonic() > deadline:
            words = "; ".join(f"{worker.name}: {worker.last_words}" for worker in workers)
            raise TrialFailed(f"{stand}, and then nothing any more ({words}); logs: {self._folder}")

    def _broker(self) -> KafkaBroker:
        numbers = str(self._config.num_partitions)
        return KafkaBroker(properties={"auto.create.topics.enable": "true", "num.partitions": numbers})


class Site:
    """One broker of a trial. ``tables``: topics that the source reads beside its own."""

    def __init__(self, servers: str, config: EventSourceConfig, tables: Collection[str] = ()) -> None:
        self._servers, self._config, self._tables = servers, config, tables
        self._settings = ClientSettings(servers, {}, client_id="kes-verify")

    def create(self, outputs: Mapping[str, int], tables: Sequence[TopicSpec] = ()) -> None:
        """Create the source topic, the outputs that were named, and the topics of tables."""
        wanted = {self._config.topic: self._config.num_partitions, **outputs}
        specs = [TopicSpec(name=name, partitions=n, replication_factor=1) for name, n in wanted.items()]
        with closing(TopicAdmin(self._settings)) as admin:
            admin.create([*specs, *tables])

    def produce(self, records: Sequence[Record], per_second: float = 0.0) -> None:
        """Write records to their topics (``""``: the source's own), at a rate (0: as fast as it goes)."""
        producer = Producer({"bootstrap.servers": self._servers, "enable.idempotence": True, "log_level": 0})
        began = time.monotonic()
        for number, record in enumerate(records):
            partition = number % self._config.num_partitions if record.partition is None else record.partition
            while True:
                try:
                    topic = record.topic or self._config.topic
                    producer.produce(topic, record.value, record.key, partition, headers=list(record.headers or ()))
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
            ahead = number / per_second - (time.monotonic() - began) if per_second else 0.0
            if ahead > 0:
                time.sleep(ahead)  # the rate
        if producer.flush(60):
            raise TrialFailed("the input could not be written within 60 s")

    def handled(self) -> int:
        """Input records below the committed offsets, -1 while the broker does not answer."""
        with closing(TopicAdmin(self._settings)) as admin:
            try:
                return sum(admin.committed(self._config.group_id, self._config.topic, 5.0).values())
            except BrokerUnavailable:
                return -1

    def lacks(self, topic: str) -> bool:
        """Check whether the broker answers that it has no such topic."""
        with closing(TopicAdmin(self._settings)) as admin:
            try:
                return admin.identity(topic, 5.0) is None
            except BrokerUnavailable:
                return False

    def left(self) -> Left:
        """Read everything that was written. Raises ``TrialFailed`` when a transaction is left hanging."""
        config = self._config
        mine = {config.topic, config.changelog, config.dead_letters, config.offsets_topic, *config.own_inputs}
        listed: Mapping[str, object] = AdminClient({"bootstrap.servers": self._servers}).list_topics(timeout=20).topics
        outputs: Sequences = defaultdict(list)
        for topic in sorted(set(listed) - mine - {*self._tables}):
            if not topic.startswith("__"):
                for record in self._read(topic):
                    outputs[topic, record.key].append((record.value, tuple(record.headers or ())))
        letters: dict[tuple[bytes | None, bytes | None], int] = defaultdict(int)
        for record in self._read(config.dead_letters):
            letters[record.key, record.value] += 1
        last = {(record.partition, record.key): record.value for record in self._read(config.changelog)}
        there = {(place, key): value for (place, key), value in last.items() if key is not None and value is not None}
        state = {place: value for place, value in there.items() if not place[1].startswith(RESERVED_KEY_PREFIX)}
        parked = self.parked()
        timers = sum(key.startswith(TIMER_PREFIX) and not key.startswith(QUEUES) for _, key in there)
        return Left(dict(outputs), dict(letters), state, timers, parked)

    def parked(self) -> frozenset[tuple[int, bytes, int]]:
        """Return partition and name of all queues with parked events, and how many these are, as far as it is
        committed."""
        with closing(TopicAdmin(self._settings)) as admin, closing(PartitionReader(self._settings)) as reader:
            marks = admin.watermarks(self._config.changelog)
            ranges = {number: (mark.start, mark.stable) for number, mark in marks.items()}
            read = reader.read_all(self._config.changelog, ranges, stalled_after_seconds=30.0)
        last = {(record.partition, record.key): record.value for records in read.values() for record in records}
        count: dict[tuple[int, bytes], int] = defaultdict(int)
        for (partition, key), value in last.items():
            if value is not None and key is not None and key.startswith(QUEUES):
                count[partition, key.removeprefix(QUEUES).partition(b"/")[0]] += 1
        return frozenset((*queue, records) for queue, records in count.items())

    def _read(self, topic: str) -> list[IncomingRecord]:
        with closing(TopicAdmin(self._settings)) as admin, closing(PartitionReader(self._settings)) as reader:
            marks = admin.watermarks(topic)
            hanging = [number for number, mark in marks.items() if mark.stable != mark.end]
            if hanging:
                raise TrialFailed(f"{topic}{hanging}: a transaction was left hanging, readers stop there")
            ranges = {number: (mark.start, mark.end) for number, mark in sorted(marks.items())}
            return list(chain.from_iterable(reader.read_all(topic, ranges, stalled_after_seconds=30.0).values()))


def differences(expected: Left, seen: Left, *, any_order: bool = False) -> list[str]:
    """List the differences after the attack, in words. ``any_order``: outputs of a key count, their order does not."""
    found = []
    for key in sorted(expected.outputs.keys() | seen.outputs.keys(), key=repr):
        one, other = expected.outputs.get(key, []), seen.outputs.get(key, [])
        if any_order:
            one, other = sorted(one, key=repr), sorted(other, key=repr)
        if one != other:
            found.append(f"{key[0]}, key {_short(key[1])}: {_difference(one, other)}")
    for letter in sorted(expected.letters.keys() | seen.letters.keys(), key=repr):
        if expected.letters.get(letter, 0) != seen.letters.get(letter, 0):
            counts = f"{seen.letters.get(letter, 0)} times, {expected.letters.get(letter, 0)} undisturbed"
            found.append(f"dead letter with key {_short(letter[0])}: {counts}")
    for place in sorted(expected.state.keys() | seen.state.keys()):
        if expected.state.get(place) != seen.state.get(place):
            texts = f"{_short(seen.state.get(place))}, undisturbed {_short(expected.state.get(place))}"
            found.append(f"state of partition {place[0]}, key {_short(place[1])}: {texts}")
    if expected.parked != seen.parked:
        found.append(f"{len(seen.parked)} parked keys, {len(expected.parked)} undisturbed, or with other events")
    return found


def _difference(one: Sequence[object], other: Collection[object]) -> str:
    counts = f"{len(other)} outputs, {len(one)} undisturbed"
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"{counts}; number {number} is {_short(b)}, undisturbed {_short(a)}"
    return counts


def _short(value: object) -> str:
    return "nothing" if value is None else repr(value)[:120]
