"""A web service over commands: each request has one effect, however often it is sent, and an answer that is committed.

pip install 'kafka-event-source[web]' fastapi
export KES_BOOTSTRAP_SERVERS=127.0.0.1:9092 KES_QUERIES_SECRET_FILE=secret
uvicorn examples.accounts_service:app

curl -X POST 127.0.0.1:8000/accounts/ada/deposit -H 'Idempotency-Key: 1' --json '{"cents": 750}'
curl -X POST 127.0.0.1:8000/accounts/ada/withdraw -H 'Idempotency-Key: 2' -H 'If-Match: 1' --json '{"cents": 100}'
curl 127.0.0.1:8000/accounts/ada
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from examples.accounts import Account, Deposit, Withdraw, source
from streams.errors import (
    BrokerUnavailable,
    CommandFailed,
    IdReused,
    NotCaughtUp,
    NotKnown,
    NotOwned,
    Parked,
    Rejected,
    VersionConflict,
)
from streams.queries import CommandClient

TIMEOUT_SECONDS = 10.0
"""How long an answer is waited for, over moves and restarts of members; then it is 504."""

Id = Annotated[str, Header(alias="Idempotency-Key", min_length=1, max_length=100)]
Version = Annotated[int | None, Header(alias="If-Match", ge=0)]


class Money(BaseModel):
    """The body of a request."""

    cents: int = Field(ge=1)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One client for the life of the service."""
    async with CommandClient.of(source) as app.state.accounts:
        yield


app = FastAPI(title="accounts", lifespan=lifespan)

STATUS: dict[type[Exception], int] = {
    VersionConflict: 412,  # look again, decide again
    IdReused: 422,  # a mistake of the caller
    CommandFailed: 500,  # no effect; the same id may be used again
    Parked: 503,  # it waits for a repair; ask again later, with the same id
    NotOwned: 503,
    NotCaughtUp: 503,
    BrokerUnavailable: 503,
    NotKnown: 504,  # it may have taken effect; ask again, with the same id
}


async def answer(request: Request, error: Exception) -> Response:
    """Answer with the status of an error."""
    found = {"version": error.version} if isinstance(error, VersionConflict) else {}
    return JSONResponse({"detail": str(error), **found}, STATUS[type(error)])


for kind in STATUS:
    app.add_exception_handler(kind, answer)


@app.exception_handler(Rejected)
async def rejected(request: Request, error: Rejected) -> Response:
    """Answer with the reason why ``decide`` has turned a command down."""
    return JSONResponse({"detail": str(error), "data": error.data}, 409)


async def ask(request: Request, command: object, name: str, id: str, version: int | None) -> dict[str, Any]:
    """Ask, and return the answer to a command that took effect."""
    client: CommandClient[str, Account] = request.app.state.accounts
    done = await client.ask(command, key=name, id=id, expected_version=version, timeout_seconds=TIMEOUT_SECONDS)
    return {"version": done.version}


@app.post("/accounts/{name}/deposit")
async def deposit(request: Request, name: str, money: Money, id: Id, version: Version = None) -> dict[str, Any]:
    """Take money in."""
    return await ask(request, Deposit(money.cents), name, id, version)


@app.post("/accounts/{name}/withdraw")
async def withdraw(request: Request, name: str, money: Money, id: Id, version: Version = None) -> dict[str, Any]:
    """Give money out."""
    return await ask(request, Withdraw(money.cents), name, id, version)


@app.get("/accounts/{name}")
async def balance(request: Request, name: str) -> Response:
    """Return the state of an account, with the effects of every command that this service has answered."""
    client: CommandClient[str, Account] = request.app.state.accounts
    found = await client.get(name, timeout_seconds=TIMEOUT_SECONDS)
    if found.value is None:
        return JSONResponse({"detail": f"there is no account {name!r}"}, 404)
    return JSONResponse(
        {"cents": found.value.state.cents, "version": found.value.version, "parked": found.parked},
        headers={"ETag": str(found.value.version)},
    )
