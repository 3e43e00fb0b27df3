"""``kes offsets start --from-group`` behind other toolkits, with their state: each event has its effect once, there or
here."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as ConsumerPartition

from benchmarks.peers.kafka_streams import javac
from benchmarks.peers.measure import KINDS
from benchmarks.peers.programs import built, output_of, python_with
from benchmarks.systems import SCRATCH, Child, System, Unavailable, register, system_running
from benchmarks.workload import Balance, Deposited, Job
from streams import EventContext, EventSource, Table, partition_of
from streams.broker.jars import pinned
from streams.records import Headers
from streams.runtime.changelog import BEGIN_KEY, OFFSET_KEY, decode_begin
from streams.sak.java import find_java
from streams.stores.foreign import ForeignRow
from tests.broker.engine_kit import Lab, Running
from tests.broker.test_cli_start import killed
from tests.vocabulary import INTS

pytestmark = [
    pytest.mark.broker, pytest.mark.nightly, pytest.mark.slow, pytest.mark.asyncio, pytest.mark.timeout(600)
]  # fmt: skip

ROOT = Path(__file__).parents[2]
PARTITIONS = 2
EVENTS = 4_000
PATIENCE = 120.0
DEPOSITED: Headers = [("__grt__", b"Deposited")]
FAUST = "faust"

register(*KINDS)


@contextlib.contextmanager
def at_work(lab: Lab, origin: str) -> Iterator[Child]:
    """A program of another toolkit over the lab's topics, with the lab's group."""
    job = Job(
        bootstrap_servers=lab.bootstrap,
        group=lab.group,
        source=lab.topic,
        output=lab.output,
        changelog="",
        partitions=PARTITIONS,
        options={"session_ms": "6000"},
    )
    try:
        if origin != FAUST:
            with system_running(System.parse(origin), job) as child:
                yield child
            return
        locked = ROOT / "requirements" / "faust.txt"
        name = f"faust-{hashlib.sha256(locked.read_bytes()).hexdigest()[:12]}"
        python = python_with(name, ["--require-hashes", "--requirement", str(locked)], print)
    except Unavailable as error:
        pytest.skip(str(error))
    with tempfile.TemporaryDirectory() as scratch:
        command = (str(python), str(Path(__file__).with_name("faust_program.py")))
        with Child(origin, command, job, variables={SCRATCH: scratch}) as child:
            yield child


def bank(lab: Lab) -> EventSource[Any]:
    source = EventSource(lab.config(), Table.factory(key=str, value=int))

    @source.on
    def on_deposited(ctx: EventContext[Any], event: Deposited) -> None:
        ctx.store.put(event.account, ctx.store.get(event.account, 0) + event.cents)
        ctx.forward(lab.output, Balance(event.account, 1, event.cents, event.sent), key=event.account)

    return source


async def deposit(lab: Lab, numbers: range) -> None:
    for number in numbers:
        event = Deposited(f"account-{number % 50}", cents_of(number), float(number), "")
        await lab.send(msgspec.json.encode(event), event.account.encode(), DEPOSITED, place_of(number))
    await lab.flush()


def place_of(number: int) -> int:
    return partition_of(f"account-{number % 50}", PARTITIONS)


def cents_of(number: int) -> int:
    return number % 7 + 1


def fold(numbers: range) -> dict[str, int]:
    found: Counter[str] = Counter()
    for number in numbers:
        found[f"account-{number % 50}"] += cents_of(number)
    return dict(found)


def take(store: Table[str, int], row: ForeignRow) -> None:
    """The rows of all three: a number, or an account with its number of events."""
    key, value = row.key.partition(b"|")[0], msgspec.json.decode(row.value)
    name = msgspec.json.decode(key) if key.startswith(b'"') else key.decode()
    store.put(name, value if isinstance(value, int) else value["cents"])


CHANGELOGS = {
    "kafka-streams": "kafka-streams:{group}-accounts-changelog",
    "quixstreams": "quixstreams:changelog__{group}--{topic}--default",
    FAUST: "faust:{group}-accounts-changelog",
}


@pytest.mark.parametrize(
    ("origin", "end"),
    [
        ("kafka-streams:session_ms=6000", "stopped"),
        ("kafka-streams:session_ms=6000", "killed"),
        ("quixstreams:session_ms=6000,transaction_ms=10000", "stopped"),
        ("quixstreams:session_ms=6000,transaction_ms=10000", "killed"),
        (FAUST, "stopped"),
    ],
)
async def test_it_goes_on_where_another_toolkit_has_ended(
    lab: Lab, kes: Callable[..., tuple[int, Any, str]], origin: str, end: str
) -> None:
    """Those that work exactly once may also be killed in the middle of a transaction, which is waited for. Faust works
    at least once."""
    await lab.create()
    await deposit(lab, range(EVENTS // 2))
    with at_work(lab, origin) as child:
        await lab.until_outputs(EVENTS // 10, PATIENCE)
        child.check()
        if end == "killed":
            child.send(signal.SIGKILL)
    await deposit(lab, range(EVENTS // 2, EVENTS))
    name = origin.partition(":")[0]
    state = CHANGELOGS[name].format(group=lab.group, topic=lab.topic)
    words = ["--from-group", lab.group, "--state", state, "--rows", f"{__name__}:take", "--yes", "--timeout", "60"]
    source = bank(lab)
    async with asyncio.timeout(PATIENCE):
        while (found := await asyncio.to_thread(kes, source, "offsets", "start", *words))[0]:
            if name == FAUST and "its end was not written in a transaction" in found[2]:
                words.append("--stopped-cleanly")
            else:
                assert "is alive (client id " in found[2], "its session is not over yet"
    assert found[1]["state"]["exact"] is (name != FAUST)
    assert 0 < sum(row["offset"] for row in found[1]["inputs"][lab.topic]) <= EVENTS // 2
    async with Running(source) as running:
        await running.until_handled(*[count for _, count in sorted(Counter(map(place_of, range(EVENTS))).items())])
    there = await lab.counts(0) | await lab.counts(1)
    assert there == fold(range(EVENTS))
    balances = [msgspec.json.decode(record.value or b"", type=Balance) for record in await lab.records()]
    assert Counter(int(balance.sent) for balance in balances) == dict.fromkeys(range(EVENTS), 1)
    await lab.check_settled(lab.topic, lab.output, lab.changelog)


@contextlib.contextmanager
def counting(lab: Lab, guarantee: str) -> Iterator[Child]:
    """An application of Kafka Streams with a plain store, a window store and a session store."""
    source = Path(__file__).with_name("WindowedCounts.java")
    try:
        java, *_, path, _ = System.parse("kafka-streams").launch().command

        def compiled(folder: Path) -> None:
            output_of([str(javac(find_java())), "-cp", path, "-d", str(folder), str(source)], PATIENCE)

        classes = built("windowed-counts", [source], pinned()[0], compiled)
    except Unavailable as error:
        pytest.skip(str(error))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        arguments = (lab.bootstrap, lab.group, lab.topic, scratch, guarantee)
        with Child("counts", (java, "-cp", f"{classes}:{path}", "WindowedCounts", *arguments), None) as child:
            yield child


def take_counts(store: Table[str, int], row: ForeignRow) -> None:
    kind = row.topic.removesuffix("-changelog").rpartition("-")[2]
    store.put(f"{kind} {row.key.decode()} {row.start_ms} {row.end_ms}", int.from_bytes(row.value, "big"))


@pytest.mark.parametrize("guarantee", ["exactly_once_v2", "at_least_once"])
async def test_all_stores_of_kafka_streams_can_be_read(
    lab: Lab, kes: Callable[..., tuple[int, Any, str]], guarantee: str
) -> None:
    """Stopped in order, both have everything. Only one of them can prove it."""
    await lab.create()
    await deposit(lab, range(500))
    with counting(lab, guarantee) as child:
        async with asyncio.timeout(PATIENCE):
            while sum((await lab.committed()).values()) < 500:
                child.check()
    names = {"kafka-streams": "all", "kafka-streams-window": "minutes", "kafka-streams-session": "sessions"}
    states = [f"--state={kind}:{lab.group}-{name}-changelog" for kind, name in names.items()]
    words = ["--from-group", lab.group, *states, "--rows", f"{__name__}:take_counts", "--yes"]
    async with asyncio.timeout(PATIENCE):
        while (found := await asyncio.to_thread(kes, bank(lab), "offsets", "start", *words))[0]:
            if guarantee == "at_least_once" and "its end was not written in a transaction" in found[2]:
                words.append("--stopped-cleanly")
            else:
                assert "is alive (client id " in found[2], "its session is not over yet"
    assert found[1]["state"]["exact"] is (guarantee == "exactly_once_v2")
    wanted: Counter[str] = Counter()
    times: dict[str, list[int]] = {}
    for record in await lab.records(lab.topic):
        name, at = (record.key or b"").decode(), record.timestamp_ms
        wanted.update([f"all {name} None None", f"minutes {name} {at - at % 60_000} None"])
        times.setdefault(name, []).append(at)
    sessions = {f"sessions {name} {min(at)} {max(at)}": len(at) for name, at in times.items()}
    assert await lab.counts(0) | await lab.counts(1) == dict(wanted) | sessions


async def test_killed_at_any_step_all_of_the_state_is_there_or_nothing(lab: Lab) -> None:
    """With 30,000 rows, which take some rounds of the transaction. The next run ends what the killed one left open."""
    await lab.create()
    await lab.create(state := f"{lab.topic}-state", cleanup_policy="compact")
    await deposit(lab, range(20))
    names = [f"account-{number}" for number in range(30_000)]
    old = f"{lab.group}-old"
    producer = Producer(
        {"bootstrap.servers": lab.bootstrap, "transactional.id": old, "queue.buffering.max.messages": 50_000}
    )
    producer.init_transactions()
    producer.begin_transaction()
    for number, name in enumerate(names):
        producer.produce(state, b"%d" % number, name.encode(), partition_of(name, PARTITIONS))
    consumer = Consumer({"bootstrap.servers": lab.bootstrap, "group.id": old})
    places = [ConsumerPartition(lab.topic, number, 3) for number in range(PARTITIONS)]
    await asyncio.to_thread(producer.send_offsets_to_transaction, places, consumer.consumer_group_metadata())
    await asyncio.to_thread(producer.commit_transaction)
    consumer.close()
    words = ("--from-group", old, "--state", f"raw:{state}", "--rows", "shop:take")
    names_of_calls = ("open", "hold_of", "hold", "end_transactional", "send")
    calls = [f"{when} {name}" for name in names_of_calls for when in ("before", "after")]
    sends = [f"within send {ms}" for ms in (1, 20, 100, 300)]
    for step in (*calls, *sends, "before commit"):
        await killed(lab, lab.group, step, *words)
    answer = await killed(lab, lab.group, "", *words)
    assert answer["written"] is False or sum(answer["state"]["rows"].values()) == len(names)
    for group, ms in [(lab.group, 0), *((f"{lab.group}-{ms}", ms) for ms in (0, 2, 5, 20, 100))]:
        await killed(lab, group, f"within commit {ms}", *words)
        await killed(lab, group, "", *words)
        records = await lab.records(f"{group}.{lab.topic}.changelog")
        rows = {
            (record.key or b"").decode(): record.value
            for record in records
            if record.key not in (BEGIN_KEY, OFFSET_KEY)
        }
        assert len(records) == len(rows) + 2 * PARTITIONS, "each of them once"
        assert {name: INTS.decode(value or b"") for name, value in rows.items()} == dict(
            zip(names, range(30_000), strict=True)
        )
        assert [decode_begin(record).at for record in records if record.key == BEGIN_KEY] == [
            {lab.topic: 3}
        ] * PARTITIONS
