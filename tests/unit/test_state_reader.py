"""The reader's choice of members: who is asked next when one is silent, and what an answer is as of."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams import EventSource, Table
from streams.errors import BrokerUnavailable, ConfigError, NotCaughtUp, NotOwned, RegistrationError, StoreError
from streams.settings.groups import QueryConfig
from tests.unit.private_kit import private
from tests.unit.waiting import PATIENCE
from tests.unit.web_kit import source_of

from streams.queries import asking as asking_module, hedging  # isort: skip
from streams.runtime.queries.questions import Question, Reply  # isort: skip
from streams.queries.reader import StateReader  # isort: skip
from streams.queries.routing import Server  # isort: skip

OWNER = Server("w-0", "http://127.0.0.1:1", owned=frozenset(range(4)))
COPY = Server("w-1", "http://127.0.0.1:2", copies=frozenset(range(4)))
OTHER = Server("w-2", "http://127.0.0.1:3")


class Members(StateReader[Any, bytes]):
    """A reader whose members answer as told: by name, the values of partitions, an error, or ``None`` for silence."""

    tells: dict[str, Any]
    asked: list[str]

    async def _put(self, server: Server, question: Question, left: float) -> Reply:
        self.asked.append(server.instance)
        told = self.tells.get(server.instance, NotOwned(f"{server.instance} does not own it"))
        if told is None:
            try:
                await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=left)
            finally:
                self._finder.note_silence(server)
            raise NotOwned(f"{server.instance} does not answer")
        if isinstance(told, Exception):
            raise told
        self._finder.note_answer(server)
        value = told.get(question.partition)
        return Reply(
            partition=question.partition, positions=(), age_seconds=1.5, served_by=server.instance, value=value
        )


@asynccontextmanager
async def members(tmp_path: Path, **more: Any) -> AsyncIterator[Members]:
    secret = private(tmp_path / "secret", "a secret of the group")
    config = source_of(queries=QueryConfig(secret_file=str(secret))).config
    async with Members(config, key=more.pop("key", str), value=bytes, **more) as reader:
        reader._finder._read_group = lambda seconds: (OWNER, OTHER, COPY)  # type: ignore[method-assign]
        reader.tells, reader.asked = {}, []
        yield reader


EVERYWHERE = dict.fromkeys(range(4), b"1")


async def test_a_copy_answers_while_the_owner_is_frozen(tmp_path: Path) -> None:
    """It is asked after a fraction of a second, and first from then on; but not where the owner must answer."""
    async with members(tmp_path) as reader:
        reader.tells = {"w-0": None, "w-1": EVERYWHERE}
        answer = await reader.get("ann", max_staleness=2.0, timeout_seconds=PATIENCE)
        assert (answer.served_by, reader.asked) == ("w-1", ["w-0", "w-1"])
        await reader.get("ann", max_staleness=2.0, timeout_seconds=PATIENCE)
        assert reader.asked[2:] == ["w-1"]
        with pytest.raises(NotOwned):
            await reader.get("ann", timeout_seconds=0.2)
        assert reader.asked[3:] == ["w-0"]
        reader.tells["w-0"] = EVERYWHERE
        assert (await reader.get("ann", timeout_seconds=PATIENCE)).served_by == "w-0"
        assert (await reader.get("ann", max_staleness=2.0, timeout_seconds=PATIENCE)).served_by == "w-0"


async def test_a_copy_that_is_younger_than_the_description_answers_too(tmp_path: Path) -> None:
    """The group is read once more while the owner is silent, and not first when its time is over."""
    views = [(OWNER, OTHER), (OWNER, OTHER, COPY)]
    async with members(tmp_path) as reader:
        reader._finder._read_group = lambda seconds: views.pop(0)  # type: ignore[method-assign]
        reader.tells = {"w-0": None, "w-1": EVERYWHERE}
        answer = await reader.get("ann", max_staleness=2.0, timeout_seconds=PATIENCE)
        assert (answer.served_by, reader.asked) == ("w-1", ["w-0", "w-1"])


async def test_the_first_answer_counts_and_an_owner_that_refuses_costs_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hedging, "HEDGE_SECONDS", 3600.0)
    async with members(tmp_path) as reader:
        reader.tells = {"w-1": EVERYWHERE}
        assert (await reader.get("ann", max_staleness=2.0, timeout_seconds=PATIENCE)).served_by == "w-1"
        assert reader.asked == ["w-0", "w-1"], "those that have it; the others are left in peace"


async def test_the_key_of_the_records_is_named_where_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By it an answer says that the key is parked. Members of older releases do not know the field."""
    named: list[Question] = []
    put = Members._put

    async def noted(self: Members, server: Server, question: Question, left: float) -> Reply:
        named.append(question)
        return msgspec.structs.replace(await put(self, server, question, left), parked=question.keyed_by == b"c1")

    monkeypatch.setattr(Members, "_put", noted)
    for routed_by, key, parked in ((None, "c1", True), (str, "c1", True), (lambda key: key[:2], "c1/o7", True)):
        async with members(tmp_path, routed_by=routed_by) as reader:
            reader.tells = dict.fromkeys(("w-0", "w-1"), EVERYWHERE)
            assert (await reader.get(key, timeout_seconds=PATIENCE)).parked is parked
    assert [each.record_key for each in named] == [None, None, b"c1"]
    assert b"record_key" not in msgspec.json.encode(named[0])


@pytest.mark.parametrize("name", ["w-0", "w-1"])
async def test_an_error_of_a_copy_hides_no_answer_of_the_owner(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hedging, "HEDGE_SECONDS", 0.01)
    async with members(tmp_path) as reader:
        failed = asyncio.Event()

        async def put(server: Server, question: Question, left: float) -> Reply:
            if server is OWNER and name == "w-1":
                await failed.wait()
            failed.set()
            return await Members._put(reader, server, question, left)

        monkeypatch.setattr(reader, "_put", put)
        reader.tells = {"w-0": EVERYWHERE, "w-1": StoreError("its folder cannot be read")}
        if name == "w-0":  # the owner's own is final
            reader.tells = {"w-0": StoreError("no such index"), "w-1": EVERYWHERE}
            with pytest.raises(StoreError, match="no such index"):
                await reader.get("ann", max_staleness=2.0, timeout_seconds=PATIENCE)
            return
        assert (await reader.get("ann", max_staleness=2.0, timeout_seconds=PATIENCE)).served_by == "w-0"
        del reader.tells["w-0"]
        with pytest.raises(StoreError, match="its folder"):
            await reader.get("ann", max_staleness=2.0, timeout_seconds=PATIENCE)


async def test_a_member_that_was_silent_is_asked_last_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a read that only an owner can answer: it may be another one by now."""
    monkeypatch.setattr(asking_module, "_REQUEST_SECONDS", 0.05)
    async with members(tmp_path) as reader:

        async def put(server: Server, question: Question, left: float) -> Reply:
            return await Members._put(reader, server, question, min(left, asking_module._REQUEST_SECONDS))

        monkeypatch.setattr(reader, "_put", put)
        reader.tells = {"w-0": None, "w-1": EVERYWHERE}
        assert (await reader.get("ann", timeout_seconds=PATIENCE)).served_by == "w-1"
        assert reader.asked == ["w-0", "w-1"]


async def test_no_request_takes_longer_than_its_caller_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its member has less time than that, to say why it does not answer."""
    given: list[Any] = []
    real = asking_module.aiohttp.ClientTimeout

    def timeout(**settings: Any) -> Any:
        given.append(real(**settings))
        return given[-1]

    secret = private(tmp_path / "secret", "a secret of the group")
    config = source_of(queries=QueryConfig(secret_file=str(secret))).config
    async with StateReader(config, key=str, value=bytes) as reader:
        monkeypatch.setattr(asking_module.aiohttp, "ClientTimeout", timeout)
        bodies: list[float] = []
        real_ticket = asking_module.ticket

        def ticket(secret: bytes, method: str, path: str, body: bytes, *rest: Any) -> str:
            bodies.append(msgspec.json.decode(body, type=Question).timeout_seconds)
            return real_ticket(secret, method, path, body, *rest)

        monkeypatch.setattr(asking_module, "ticket", ticket)
        question = Question(group="shop", kind="len", partition=0)
        for left in (0.2, 5.7, 60.0):
            with pytest.raises(NotOwned, match="does not answer"):
                await reader._put(OWNER, question, left)
            assert bodies[-1] < given[-1].total <= left
            assert given[-1].ceil_threshold > given[-1].total, "it is not rounded up"


async def test_an_answer_is_as_of_what_was_promised(tmp_path: Path) -> None:
    """Its age counts from when the question was put to the one who answered, not from the tries before."""
    async with members(tmp_path) as reader:
        reader.tells = {"w-0": None, "w-1": EVERYWHERE}
        called = time.time()
        answer = await reader.get("ann", max_staleness=1.5, timeout_seconds=PATIENCE)
        assert called + hedging.HEDGE_SECONDS - 0.05 <= answer.as_of + 1.5 <= time.time()


async def test_a_look_that_had_less_time_is_made_again(tmp_path: Path) -> None:
    looks: list[float] = []
    hurried_is_over = threading.Event()

    def look(seconds: float) -> tuple[Server, ...]:
        looks.append(seconds)
        if len(looks) == 1:
            hurried_is_over.wait(PATIENCE)
            raise BrokerUnavailable("no answer within 1 s")
        return (OWNER,)

    async with members(tmp_path) as reader:
        reader._finder._read_group = look  # type: ignore[method-assign]
        reader.tells = {"w-0": EVERYWHERE}
        hurried = asyncio.create_task(reader.get("ann", timeout_seconds=0.1))
        patient = asyncio.create_task(reader.get("ann", timeout_seconds=PATIENCE))  # behind it, and its look
        with pytest.raises(BrokerUnavailable, match="could not be looked at within"):
            await hurried
        hurried_is_over.set()
        assert (await patient).value == b"1"
    assert len(looks) == 2


async def test_a_look_that_takes_longer_hides_no_reason(tmp_path: Path) -> None:
    goes_on = threading.Event()
    async with members(tmp_path) as reader:
        looks = [lambda: goes_on.wait(PATIENCE), lambda: None]
        reader._finder._read_group = lambda seconds: (looks.pop()(), OWNER)[1:]  # type: ignore[method-assign,func-returns-value]
        reader.tells = {"w-0": NotCaughtUp("it is not as far")}
        with pytest.raises(NotCaughtUp, match="the last reason: it is not as far"):
            await reader.get("ann", timeout_seconds=1.0)
        goes_on.set()


async def test_a_key_whose_records_have_another_one(tmp_path: Path) -> None:
    async with members(tmp_path) as reader:
        home = reader.partition_of("ann")
        elsewhere = (home + 1) % 4
        reader.tells = {"w-0": {elsewhere: b"1"}}
        assert not reader.is_routed
        answer = await reader.get("ann")
        assert (answer.value, answer.partition) == (None, home), "of one partition, which it names"
        everywhere = await reader.get_everywhere("ann", confirm=True)
        assert [(one.partition, one.value) for one in everywhere if one.value] == [(elsewhere, b"1")]
        assert len(everywhere) == 4
    by_number = {"key": int, "routed_by": lambda key: f"customer-{key % 100}"}
    async with members(tmp_path, **by_number) as reader:
        assert reader.is_routed
        assert reader.partition_of(107) == reader.partition_of(7)
        with pytest.raises(ConfigError, match=r"routed_by makes no key of records of 'x': TypeError"):
            reader.partition_of("x")


async def test_an_error_of_one_partition_ends_the_questions_to_the_others(tmp_path: Path) -> None:
    async with members(tmp_path) as reader:
        before = asyncio.all_tasks()

        async def put(server: Server, question: Question, left: float) -> Reply:
            if question.partition == 3:
                raise StoreError("its folder cannot be read")
            reader.tells = {"w-0": None}
            return await Members._put(reader, server, question, left)

        reader._put = put  # type: ignore[method-assign]
        for asked in (reader.get_everywhere("ann"), reader.len()):
            with pytest.raises(StoreError):
                await asked
            assert asyncio.all_tasks() == before


def test_a_source_declares_it_once(tmp_path: Path) -> None:
    secret = private(tmp_path / "secret", "a secret of the group")
    config = source_of(queries=QueryConfig(secret_file=str(secret))).config
    factory = Table.factory(key=str, value=int)
    source: EventSource[Table[str, int]] = EventSource(config, factory, routed_by=lambda order: order.partition("/")[0])
    reader = StateReader.of(source)
    assert reader.is_routed
    assert reader.partition_of("c12/o7") == reader.partition_of("c12/o8")
    assert not StateReader.of(EventSource(config, factory)).is_routed
    assert not StateReader.of(source, routed_by=None).is_routed
    with pytest.raises(RegistrationError, match=r"routed_by is .* it is called with \(key\)"):
        EventSource(config, factory, routed_by=lambda: "")  # type: ignore[misc,arg-type]
