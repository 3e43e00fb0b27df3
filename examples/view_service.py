"""A web service over a view: it answers from the state of the bank, without a question to the bank or to Kafka.

pip install fastapi uvicorn
KES_BOOTSTRAP_SERVERS=127.0.0.1:9092 uvicorn examples.view_service:app

curl 127.0.0.1:8000/accounts/ada
curl '127.0.0.1:8000/accounts/ada?fresh_within=2'
curl '127.0.0.1:8000/total'
curl -N 127.0.0.1:8000/changes
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from examples.bank import Account, source
from streams import View
from streams.errors import BrokerUnavailable, NotCaughtUp, StoreError

TIMEOUT_SECONDS = 10.0
"""How long a proof of freshness is waited for; then the answer is 503."""


class Balance(BaseModel):
    """The body of an answer."""

    account: str
    cents: int


class Total(BaseModel):
    """All accounts at one moment."""

    accounts: int
    cents: int
    positions: dict[int, int]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One view for the life of the service; requests that come before it is complete are answered with 503."""
    async with View.of(source) as app.state.accounts:
        yield


app = FastAPI(title="bank view", lifespan=lifespan)


@app.exception_handler(NotCaughtUp)
@app.exception_handler(StoreError)
@app.exception_handler(BrokerUnavailable)
async def unavailable(request: Request, error: Exception) -> Response:
    """Say that the view is incomplete, has failed, or cannot prove what is wanted."""
    return JSONResponse({"detail": str(error)}, 503)


def accounts_of(request: Request) -> View[str, Account]:
    """Return the view."""
    accounts: View[str, Account] = request.app.state.accounts
    return accounts


@app.get("/ready")
async def ready(request: Request) -> str:
    """Say that the view may be read, for a load balancer."""
    await accounts_of(request).ready(timeout_seconds=0.1)
    return "ready"


@app.get("/accounts/{account}")
async def balance(
    account: str, request: Request, fresh_within: Annotated[float | None, Query(gt=0, le=60)] = None
) -> Balance:
    """Answer from what is here; with ``fresh_within``, from what is proven to be no older than so many seconds."""
    accounts = accounts_of(request)
    if fresh_within is not None:
        await accounts.fresh_within(fresh_within, TIMEOUT_SECONDS)
    found = accounts.get(account)
    if found is None:
        raise HTTPException(404, "no such account")
    return Balance(account=account, cents=found.cents)


@app.get("/total")
def total(request: Request) -> Total:
    """Add up all accounts, on a thread; what comes meanwhile is not in it."""
    with accounts_of(request).snapshot() as frozen:
        cents = sum(account.cents for account in frozen.values())
        return Total(accounts=len(frozen), cents=cents, positions=dict(frozen.positions))


@app.get("/changes")
async def changes(request: Request) -> StreamingResponse:
    """Stream all accounts, and then what changes: server-sent events."""
    arriving = accounts_of(request).changes(initial=True)

    async def lines() -> AsyncIterator[str]:
        async for change in arriving:
            cents = 0 if change.new is None else change.new.cents
            yield f"data: {Balance(account=change.key, cents=cents).model_dump_json()}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
