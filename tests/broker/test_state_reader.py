"""``StateReader`` on a real broker: the owner is found, over a move and a crash; nobody else gets an answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec
import pytest

from examples import bank as example_bank
from examples import query_service
from streams import EventContext, EventProducer, EventSource, Table
from streams.broker.probe import free_port, is_free
from streams.codecs import int_codec
from streams.errors import ConfigError, NotCaughtUp, NotOwned, StoreError
from streams.queries import QueryServer, StateReader
from streams.queries.routing import Server
from streams.queries.tickets import SEAL_HEADER, TICKET_HEADER, TicketRefused, check_seal, group_secret, ticket
from streams.records import TopicPartition
from streams.runtime.queries.questions import PATH, Question, Reply
from streams.sak.murmur2 import partition_of
from streams.settings.groups import QueryConfig
from tests.broker.engine_kit import Lab, Running
from tests.broker.kes_kit import ROOT, KesRun
from tests.unit.private_kit import private
from tests.unit.waiting import PATIENCE, until
from tests.vocabulary import Totals, count, register

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]

PARTITIONS = 2
NAMES = ("ann", "bob", "cid", "dan", "eve")


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    return str(private(tmp_path / "secret", "the secret of this group\n"))


def member(lab: Lab, secret_file: str, **settings: Any) -> EventSource[Totals]:
    config = lab.config(queries=QueryConfig(secret_file=secret_file), num_standbys=1, **settings)
    source = EventSource(config, Table.factory(key=str, value=int, ordered=True))
    register(source, count)
    return source


@asynccontextmanager
async def answering(source: EventSource[Totals], *, active: int) -> AsyncIterator[tuple[Running, QueryServer]]:
    server = QueryServer(source, "127.0.0.1:0")
    try:
        async with Running(source, active=active) as run:
            yield run, server
    finally:
        await asyncio.to_thread(server.close)


def reader_of(lab: Lab, secret_file: str) -> StateReader[str, int]:
    return StateReader(lab.config(queries=QueryConfig(secret_file=secret_file)), key=str, value=int)


async def fill(lab: Lab) -> None:
    for name in NAMES:
        await lab.add(name, partition=partition_of(name.encode(), lab.partitions))


async def put(address: str, question: Question, asked: str) -> tuple[int, bytes, str]:
    async with aiohttp.ClientSession() as session:
        headers = {TICKET_HEADER: asked}
        async with session.post(address + PATH, data=msgspec.json.encode(question), headers=headers) as response:
            return response.status, await response.read(), response.headers.get(SEAL_HEADER, "")


async def test_the_owner_is_found_over_a_move(lab: Lab, secret_file: str) -> None:
    await lab.create()
    await fill(lab)
    first, second = member(lab, secret_file), member(lab, secret_file)
    async with AsyncExitStack() as stack:
        _, server = await stack.enter_async_context(answering(first, active=2))
        reader = await stack.enter_async_context(reader_of(lab, secret_file))
        counts = dict.fromkeys(range(2), 0)
        for name in NAMES:
            counts[reader.partition_of(name)] += 1
        ends = {TopicPartition(lab.topic, number): end for number, end in counts.items()}
        answers = [await reader.get(name, at_least=ends, timeout_seconds=20.0) for name in NAMES]
        assert [answer.value for answer in answers] == [1] * 5
        assert {answer.served_by for answer in answers} == {first.config.instance_id}
        assert (await reader.get("nobody", confirm=True)).value is None
        assert await reader.len() == 5
        assert [row async for row in reader.range("b", "d")] == [("bob", 1), ("cid", 1)]
        assert [row async for row in reader.prefix("e")] == [("eve", 1)]
        with pytest.raises(NotCaughtUp):
            await reader.get("ann", at_least=dict.fromkeys(ends, 99), timeout_seconds=1.0)

        async with answering(second, active=0) as (run, other):
            await run.until(lambda: run.active == 1, "it has taken one")
            answers = [await reader.get(name, at_least=ends, timeout_seconds=20.0) for name in NAMES]
            assert [answer.value for answer in answers] == [1] * 5
            assert {answer.served_by for answer in answers} == {first.config.instance_id, second.config.instance_id}
            await check_the_door(lab, secret_file, server, other)
            await check_copies(reader, answers)
        answers = [await reader.get(name, timeout_seconds=20.0) for name in NAMES]
        assert {answer.served_by for answer in answers} == {first.config.instance_id}, "the other one is gone"
    async with reader_of(lab, secret_file) as late:
        with pytest.raises(NotOwned, match="no answer within"):
            await late.get("ann", timeout_seconds=1.0)


async def test_the_command_line_and_the_example_ask_the_owner(
    lab: Lab, secret_file: str, kes: Callable[..., tuple[int, Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    await lab.create(lab.topic)
    account = example_bank.source
    config = lab.config(queries=QueryConfig(secret_file=secret_file))
    source = EventSource(config, Table.factory(key=str, value=example_bank.Account, ordered=True))
    source.register_event_type(example_bank.Deposited, deposited)
    monkeypatch.setattr(account, "config", config)
    app = query_service.app

    async def ask(*words: str) -> tuple[int, Any]:
        code, answer, _ = await asyncio.to_thread(kes, source, "state", *words)
        return code, answer

    async with (
        answering(source, active=lab.partitions),
        EventProducer(lab.bootstrap) as producer,
        query_service.lifespan(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bank") as client,
    ):
        sent = await producer.send(lab.topic, example_bank.Deposited("ada", 750), key="ada")
        place = f"{sent.partition}@{sent.offset}"
        code, answer = await ask("get", "ada", "--ask-owner", "--at-least", place)
        (entry,) = answer["entries"]
        assert (code, entry["value"], entry["served_by"]) == (0, {"cents": 750}, source.config.instance_id)
        code, answer = await ask("scan", "--ask-owner", "--prefix", "a")
        assert (code, [(row["key"], row["value"]) for row in answer["entries"]]) == (0, [("ada", {"cents": 750})])
        code, answer = await ask("get", "eve", "--ask-owner", "--confirm")
        assert (code, answer["absence"]) == (1, f"in none of the {lab.partitions} partitions")
        elsewhere = (sent.partition + 1) % lab.partitions
        code, answer = await ask("get", "ada", "--ask-owner", "--partition", str(elsewhere))
        assert (code, answer["absence"]) == (1, f"not in partition {elsewhere}; no other partition was searched")
        other = await producer.send(lab.topic, example_bank.Deposited("fay", 1), key="ada")
        code, answer = await ask("get", "fay", "--ask-owner", "--at-least", f"{other.partition}@{other.offset}")
        assert (code, answer["entries"][0]["partition"]) == (0, sent.partition), "of a record with another key"
        assert (await ask("get", "ada", "--confirm"))[0] == 2, "without --ask-owner"
        answer = await client.get("/accounts/ada?confirm=true")
        assert (answer.status_code, answer.json()["cents"]) == (200, 750)
        assert (await client.get("/accounts/eve")).status_code == 404
        assert (await client.get("/accounts/ada?max_staleness=0")).status_code == 422


def deposited(ctx: EventContext[Any], event: example_bank.Deposited) -> None:
    before = ctx.store.get(event.account) or example_bank.Account()
    ctx.store.put(event.account, example_bank.Account(before.cents + event.cents))


SOURCE = """
from streams import EventSource, EventSourceConfig, GroupConfig, Table
from tests.vocabulary import count, register

config = EventSourceConfig(group_id={group!r}, topic={topic!r}, num_partitions=2, group=GroupConfig(num_standbys=1))
source = EventSource(config, Table.factory(key=str, value=int))
register(source, count)
"""


FREEZING = """
import os
import signal
from pathlib import Path
from streams.queries import service
from streams.runtime.queries import points

read_of = service.read_of

def freezing(question, store):
    found = read_of(question, store)
    mark = Path({folder!r}) / str(os.getpid())
    if mark.exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
    return found

points.read_of = service.read_of = freezing
"""


def two_workers(lab: Lab, secret_file: str, tmp_path: Path, program: str) -> KesRun:
    (tmp_path / "asked.py").write_text(program)
    port = free_port()
    while not is_free(port + 1):  # of the second worker
        port = free_port()
    environment = {
        "KES_BOOTSTRAP_SERVERS": lab.bootstrap, "KES_QUERIES_SECRET_FILE": secret_file,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    return KesRun("asked:source", 2, tmp_path / "log", tmp_path, environment, ["--queries", f"127.0.0.1:{port}"])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("struck", ["owner", "standby"])
async def test_a_member_that_is_frozen_between_read_and_answer_gives_no_old_answer(
    lab: Lab, secret_file: str, tmp_path: Path, struck: str
) -> None:
    """It stands still in the turn of a question, right after the read, while others commit; and a second question waits
    at its door when it goes on."""
    await lab.create(lab.topic)
    secret, number = group_secret(secret_file), partition_of(b"ann", 2)
    program = SOURCE.format(group=lab.group, topic=lab.topic) + FREEZING.format(folder=str(tmp_path))
    run = two_workers(lab, secret_file, tmp_path, program)
    staleness = 2.0 if struck == "standby" else None
    question = Question(group=lab.group, kind="get", partition=number, key=b"ann", max_staleness=staleness)
    try:
        async with reader_of(lab, secret_file) as reader:

            async def value(count: int) -> str:
                """Wait until the owner has so many, and name it."""
                while (answer := await reader.get("ann", confirm=True, timeout_seconds=60.0)).value != count:
                    await asyncio.sleep(0.05)
                return answer.served_by

            async def settled() -> tuple[Server, Server]:
                """Wait until each has one partition, and the copy of the other; return the owner, then the standby."""
                while True:
                    servers = sorted(await reader._finder.refresh(10.0), key=lambda each: number in each.copies)
                    if [each.copies for each in servers] == [{1 - number}, {number}]:
                        return servers[0], servers[1]

            await lab.add("ann", partition=number)
            owner, standby = await settled()
            assert await value(1) == owner.instance
            place = owner if struck == "owner" else standby
            pid = run.pid(place.instance)
            assert pid is not None

            def ask() -> asyncio.Future[tuple[int, bytes, str]]:
                body = msgspec.json.encode(question)
                asked = ticket(secret, "POST", PATH, body, place.address, time.time())
                return asyncio.ensure_future(put(place.address, question, asked))

            (tmp_path / str(pid)).touch()
            first = ask()
            await until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it stands")
            for _ in range(5):
                await lab.add("ann", partition=number)
            assert (await value(6) == owner.instance) == (struck == "standby")
            committed = time.monotonic()
            late = ask()
            await until(lambda: time.monotonic() > committed + 2.5, "its proof is over")
            assert not first.done()
            assert not late.done()
            os.kill(pid, signal.SIGCONT)
            for status, content, _ in (await first, await late):
                assert status in (200, 421, 504), content
                assert status != 200 or int_codec.decode(msgspec.json.decode(content, type=Reply).value or b"") == 6
            await value(6)
    finally:
        run.close()


async def owner_with_copy(reader: StateReader[str, int], secret_file: str, key: str) -> str:
    """Wait until another member answers from a copy, too; return the owner."""
    group, number = reader.config.group_id, reader.partition_of(key)
    question = Question(
        group=group, kind="get", partition=number, key=key.encode(), max_staleness=2.0, timeout_seconds=1.0
    )
    async with asyncio.timeout(2 * PATIENCE):
        while True:
            owner = (await reader.get(key, timeout_seconds=60.0)).served_by
            for server in await reader._finder.refresh(10.0):
                if server.instance == owner:
                    continue
                body, secret = msgspec.json.encode(question), group_secret(secret_file)
                with contextlib.suppress(aiohttp.ClientError):  # it is not back yet
                    asked = ticket(secret, "POST", PATH, body, server.address, time.time())
                    if (await put(server.address, question, asked))[0] == 200:
                        return owner


async def freeze(lab: Lab, pid: int, number: int) -> None:
    """Freeze a process between two transactions of this partition: behind one that it leaves open, copies prove
    nothing until the successor has ended it."""

    async def marks() -> tuple[int, int]:
        found = (await asyncio.to_thread(lab.admin.watermarks, lab.changelog, [number]))[number]
        return found.stable, found.end

    async with asyncio.timeout(PATIENCE):
        while True:
            os.kill(pid, signal.SIGSTOP)
            before, now = await marks(), await marks()  # twice: what it had sent may have been under way
            if before == now and now[0] == now[1]:
                return
            os.kill(pid, signal.SIGCONT)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("strike", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
async def test_no_read_goes_back_while_owners_are_struck(
    lab: Lab, secret_file: str, tmp_path: Path, strike: signal.Signals
) -> None:
    """Leased and confirmed reads of one key, side by side, are in one order: that of its growing value."""
    await lab.create(lab.topic)
    run = two_workers(lab, secret_file, tmp_path, SOURCE.format(group=lab.group, topic=lab.topic))
    history: list[tuple[float, float, int]] = []
    strikes: list[float] = []
    stale: list[tuple[float, float, float, int]] = []
    over = asyncio.Event()
    number = partition_of(b"ann", 2)

    async def read(reader: StateReader[str, int], confirm: bool) -> None:
        while not over.is_set():
            called = time.time()
            with contextlib.suppress(NotOwned, NotCaughtUp):
                answer = await reader.get("ann", confirm=confirm, timeout_seconds=30.0)
                history.append((called, time.time(), answer.value or 0))

    async def read_copies(reader: StateReader[str, int]) -> None:
        while not over.is_set():
            called = time.time()
            with contextlib.suppress(NotOwned, NotCaughtUp):
                answer = await reader.get("ann", max_staleness=2.0, timeout_seconds=5.0)
                stale.append((called, time.time(), answer.as_of, answer.value or 0))

    try:
        async with reader_of(lab, secret_file) as reader, reader_of(lab, secret_file) as of_copies:
            await lab.add("ann", partition=number)
            reading = [asyncio.ensure_future(read(reader, confirm)) for confirm in (False, False, True)]
            reading.append(asyncio.ensure_future(read_copies(of_copies)))
            for _ in range(3):
                pid = run.pid(await owner_with_copy(reader, secret_file, "ann"))
                assert pid is not None
                if strike == signal.SIGSTOP:
                    await freeze(lab, pid, number)
                else:
                    os.kill(pid, strike)
                strikes.append(time.time())
                began, sent = time.monotonic(), 0
                while time.monotonic() < began + 8.0:  # its session is over, and another one goes on
                    await lab.add("ann", partition=number)
                    sent += 1
                    await asyncio.sleep(0.05)
                if strike == signal.SIGSTOP:
                    os.kill(pid, signal.SIGCONT)
                await reader.get("ann", confirm=True, timeout_seconds=60.0)
            over.set()
            await asyncio.gather(*reading)
    finally:
        run.close()
    assert len(history) > 100
    assert max(value for _, _, value in history) > 1
    for called, _, value in history:
        before = max((other for _, answered, other in history if answered < called), default=0)
        assert value >= before, "it goes back"
    for called, _, as_of, value in stale:
        assert as_of >= called - 2.0
        assert value >= max((other for _, answered, other in history if answered < as_of), default=0), "too old"
    for struck in strikes:
        waited = min(answered - struck for called, answered, _, _ in stale if called > struck)
        assert waited < 3.0, "a copy answers before the session of the owner is over"


async def check_copies(reader: StateReader[str, int], answers: list[Any]) -> None:
    """A copy may answer as well, and says as of when."""
    called = time.time()
    for name, before in zip(NAMES, answers, strict=True):
        answer = await reader.get(name, max_staleness=2.0, at_least=before.positions, timeout_seconds=20.0)
        assert answer.value == 1
        assert answer.as_of > called - 2.0


async def check_the_door(lab: Lab, secret_file: str, server: QueryServer, other: QueryServer) -> None:
    """Without a ticket for this request at this member, nothing is answered."""
    secret = group_secret(secret_file)
    question = Question(group=lab.group, kind="get", partition=0, key=b"ann", timeout_seconds=1.0)
    body = msgspec.json.encode(question)
    good = ticket(secret, "POST", PATH, body, server.address, time.time())
    status, content, sealed = await put(server.address, question, good)
    if status == 200:
        msgspec.json.decode(content, type=Reply)
    else:
        assert status == 421, content
    check_seal(secret, sealed, good, status, content)
    bad = {
        "none": "",
        "of another member": ticket(secret, "POST", PATH, body, other.address, time.time()),
        "of another question": ticket(secret, "POST", PATH, b"{}", server.address, time.time()),
        "of another group": ticket(b"a guess at the secret", "POST", PATH, body, server.address, time.time()),
        "too old": ticket(secret, "POST", PATH, body, server.address, time.time() - 120.0),
    }
    for what, asked in bad.items():
        status, content, sealed = await put(server.address, question, asked)
        assert (status, sealed) == (401, ""), what
        assert secret not in content
    guess = private(Path(secret_file).with_name("guess"), "a guess at the secret")
    async with reader_of(lab, str(guess)) as stranger:
        with pytest.raises(TicketRefused):
            await stranger.get("ann", timeout_seconds=2.0)
    huge = msgspec.structs.replace(question, key=b"x" * 100_000)
    asked = ticket(secret, "POST", PATH, msgspec.json.encode(huge), server.address, time.time())
    assert (await put(server.address, huge, asked))[0] == 413


async def test_a_server_that_would_be_open_does_not_start(lab: Lab, secret_file: str) -> None:
    with pytest.raises(ConfigError, match="without TLS"):
        QueryServer(member(lab, secret_file), "0.0.0.0:0")
    with pytest.raises(ConfigError, match="secret_file"):
        QueryServer(member(lab, ""), "127.0.0.1:0")
    source = member(lab, secret_file)
    with QueryServer(source, "127.0.0.1:0") as server:
        port = server.address.rpartition(":")[2]
        with pytest.raises(ConfigError, match="name another port"):
            QueryServer(member(lab, secret_file), f"127.0.0.1:{port}")
        question = Question(group=lab.group, kind="get", partition=0, key=b"ann")
        asked = ticket(
            group_secret(secret_file), "POST", PATH, msgspec.json.encode(question), server.address, time.time()
        )
        status, content, _ = await put(server.address, question, asked)
        assert (status, b"not running" in content) == (421, True)


async def test_reads_of_a_reader_that_is_not_open_or_cannot_be(lab: Lab, secret_file: str) -> None:
    reader = StateReader(lab.config(queries=QueryConfig(secret_file=secret_file)), key=int, value=int)
    with pytest.raises(ConfigError, match="routed_by"):
        reader.partition_of(5)
    with pytest.raises(StoreError, match="no prefixes"):
        await anext(reader.prefix(5))
