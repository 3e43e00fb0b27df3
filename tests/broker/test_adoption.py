"""``kes offsets start --from-group`` behind other toolkits: each event has its effect once, there or here."""

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

from benchmarks.peers.measure import KINDS
from benchmarks.peers.programs import python_with
from benchmarks.systems import SCRATCH, Child, System, Unavailable, register, system_running
from benchmarks.workload import Balance, Deposited, Job
from streams import EventContext, EventSource, Table
from streams.records import Headers
from tests.broker.engine_kit import Lab, Running

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
        ctx.forward(lab.output, Balance(event.account, 1, event.cents, event.sent), key=event.account)

    return source


async def deposit(lab: Lab, numbers: range) -> None:
    for number in numbers:
        event = Deposited(f"account-{number % 50}", 1, float(number), "")
        await lab.send(msgspec.json.encode(event), event.account.encode(), DEPOSITED, number % PARTITIONS)
    await lab.flush()


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
    source, words = bank(lab), ("offsets", "start", "--from-group", lab.group, "--missing", "earliest", "--yes")
    async with asyncio.timeout(PATIENCE):
        while (found := await asyncio.to_thread(kes, source, *words))[0]:
            assert "is alive (client id " in found[2], "its session is not over yet"
    assert 0 < sum(row["offset"] for row in found[1]["inputs"][lab.topic]) <= EVENTS // 2
    async with Running(source) as running:
        await running.until_handled(EVENTS // 2, EVENTS // 2)
    balances = [msgspec.json.decode(record.value or b"", type=Balance) for record in await lab.records()]
    assert Counter(int(balance.sent) for balance in balances) == dict.fromkeys(range(EVENTS), 1)
    await lab.check_settled(lab.topic, lab.output, lab.changelog)
