"""Commands over HTTP, on a real broker: a web service asks two workers, one of which is killed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from examples import accounts, accounts_service
from examples.accounts import Deposited, Withdrawn
from streams.broker.probe import free_port, is_free
from streams.errors import ConfigError, NotKnown, RegistrationError
from streams.model.commands import VERSION_HEADER
from streams.queries import CommandClient
from streams.settings.groups import QueryConfig
from tests.broker.examples_kit import Example, Make, example
from tests.broker.kes_kit import KesRun
from tests.unit.private_kit import private

__all__ = ["example"]  # a fixture

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

NAMES = [f"account-{number}" for number in range(6)]
FINAL = (200, 409, 412, 422)
"""These say what came of a command; after any other status the request is repeated, with the same id."""


class Callers:
    """The callers of the service. ``answers``: by id, the status and body that it has."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self.client = client
        self.chance = random.Random(seed)
        self.answers: dict[str, tuple[int, Any]] = {}
        self.requests: dict[str, tuple[str, int, dict[str, str]]] = {}
        self.again = 0

    def prepare(self, count: int) -> None:
        for number in range(len(self.requests), count):
            what = self.chance.choice(("deposit", "deposit", "withdraw"))
            headers = {"Idempotency-Key": f"id-{number}"}
            if self.chance.random() < 0.2:
                headers["If-Match"] = str(self.chance.randrange(4))
            path = f"/accounts/{self.chance.choice(NAMES)}/{what}"
            self.requests[f"id-{number}"] = path, self.chance.choice((5, 50, 500)), headers

    async def ask(self, id: str) -> tuple[int, Any]:
        path, cents, headers = self.requests[id]
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            answer = await self.client.post(path, json={"cents": cents}, headers=headers)
            if answer.status_code in FINAL:
                return answer.status_code, answer.json()
            assert answer.status_code in (503, 504), answer.text
            self.again += 1
        raise AssertionError(f"{id} has no answer")

    async def ask_all(self) -> None:
        waiting = list(self.requests)

        async def caller() -> None:
            while waiting:
                id = waiting.pop(0)
                found = await self.ask(id)
                assert self.answers.setdefault(id, found) == found, "another answer for the same id"

        await asyncio.gather(*(caller() for _ in range(8)))


def prepared(example: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """Make the topics; the settings are those of the environment, which a program has before it imports the source."""
    secret = str(private(tmp_path / "secret", "the secret of this group\n"))
    found = example(accounts, "account-events", KES_QUERIES_SECRET_FILE=secret)
    config = msgspec.structs.replace(
        accounts.source.config, bootstrap_servers=found.servers, queries=QueryConfig(secret_file=secret)
    )
    monkeypatch.setattr(accounts.source, "config", config)
    return found


def check_output(found: Example, answers: dict[str, tuple[int, Any]], requests: dict[str, Any]) -> None:
    versions: dict[str, list[int]] = defaultdict(list)
    for record in found.records("account-events"):
        versions[(record.key or b"").decode()].append(int(record.header(VERSION_HEADER) or b""))
    done: dict[str, list[int]] = defaultdict(list)
    for id, (status, body) in answers.items():
        if status == 200:
            done[requests[id][0].split("/")[2]].append(body["version"])
    assert {name: sorted(numbers) for name, numbers in done.items()} == versions, "each id one effect, without gap"
    for numbers in versions.values():
        assert numbers == list(range(1, len(numbers) + 1)), "in order"


def test_a_service_asks_two_workers_of_which_one_is_killed(
    example: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    found = prepared(example, tmp_path, monkeypatch)
    port = free_port()
    while not is_free(port + 1):  # of the second worker
        port = free_port()
    with found.run(tmp_path, options=["--queries", f"127.0.0.1:{port}"]) as workers:
        callers = asyncio.run(serve(workers, seed))
    check_output(found, callers.answers, callers.requests)
    statuses = {status for status, _ in callers.answers.values()}
    assert {200, 409, 412} <= statuses, "the callers have met each kind of answer"


async def serve(workers: KesRun, seed: int) -> Callers:
    app = accounts_service.app
    async with (
        accounts_service.lifespan(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://accounts", timeout=60) as client,
    ):
        callers = Callers(client, seed)
        callers.prepare(40)
        await callers.ask_all()
        callers.prepare(160)
        asking = asyncio.create_task(callers.ask_all())
        while len(callers.answers) < 80 and not asking.done():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(workers.signal, seed % 2)
        await asking
        before = dict(callers.answers)
        await callers.ask_all()
        assert callers.answers == before
        await read_and_refuse(client, callers)
    return callers


async def read_and_refuse(client: httpx.AsyncClient, callers: Callers) -> None:
    """What the service has answered is in what it reads; what cannot be is refused, and nothing is sent."""
    name = callers.requests["id-0"][0].split("/")[2]
    versions = [
        body["version"] for id, (status, body) in callers.answers.items()
        if status == 200 and callers.requests[id][0].split("/")[2] == name
    ]  # fmt: skip
    answer = await client.get(f"/accounts/{name}")
    assert (answer.status_code, answer.json()["version"]) == (200, max(versions))
    assert (await client.get("/accounts/none")).status_code == 404
    path, body = f"/accounts/{name}/deposit", {"cents": 5}
    assert (await client.post(path, json=body)).status_code == 422, "no id"
    assert (await client.post(path, json=body, headers={"Idempotency-Key": "x" * 101})).status_code == 422
    wrong = {"Idempotency-Key": "new", "If-Match": "-1"}
    assert (await client.post(path, json=body, headers=wrong)).status_code == 422
    other = await client.post(path, json={"cents": 7}, headers={"Idempotency-Key": "id-0"})
    assert other.status_code == 422, "an id of another command"
    reader: CommandClient[str, accounts.Account] = accounts_service.app.state.accounts
    with pytest.raises(RegistrationError, match="has no decide"):
        await reader.ask(Deposited(1), key=name, id="new")
    for arguments in ({"id": ""}, {"id": "1", "expected_version": -1}, {"id": "1", "timeout_seconds": 0}):
        with pytest.raises(ConfigError):
            await reader.ask(accounts.Deposit(1), key=name, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="half of what"):
        await reader.ask(accounts.Deposit(1), key=name, id="1", timeout_seconds=43_201)
    answer = await client.get(f"/accounts/{name}")
    assert answer.json()["version"] == max(versions), "nothing of that had an effect"


def test_without_a_member_nothing_is_known_and_the_command_waits(
    example: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prepared(example, tmp_path, monkeypatch)

    async def ask(seconds: float) -> int:
        async with CommandClient.of(accounts.source) as client:
            done = await client.ask(accounts.Deposit(5), key="ada", id="1", timeout_seconds=seconds)
            assert done.events == (Deposited(5),)
            state = (await client.get("ada")).value
            assert state is not None
            assert state.state.cents == 5
            return done.version

    with pytest.raises(NotKnown, match="no answer within 2 s"):
        asyncio.run(ask(2.0))
    with found.run(tmp_path, workers=1, options=["--queries", f"127.0.0.1:{free_port()}"]):
        assert asyncio.run(ask(60.0)) == 1, "it was in the topic, and took effect once"
        assert asyncio.run(ask(60.0)) == 1
    assert found.events("account-events", Deposited, Withdrawn) == [Deposited(5)]
