"""A web service that asks the running bank: what is committed now, by the member that owns the account.

pip install 'kafka-event-source[web]' fastapi
(umask 077; head -c 32 /dev/urandom | base64 > secret)
export KES_BOOTSTRAP_SERVERS=127.0.0.1:9092 KES_QUERIES_SECRET_FILE=secret
kes run examples.bank:source --queries 127.0.0.1:9200
uvicorn examples.query_service:app

curl 127.0.0.1:8000/accounts/ada
curl '127.0.0.1:8000/accounts/ada?max_staleness=2'
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from examples.bank import Account, source
from streams.errors import BrokerUnavailable, NotCaughtUp, NotOwned
from streams.queries import StateReader

TIMEOUT_SECONDS = 10.0
"""How long an answer is waited for, over moves and restarts of members; then it is 503."""


class Balance(BaseModel):
    """The body of an answer. ``as_of``: everything that was committed before is in it (seconds since 1970)."""

    account: str
    cents: int
    as_of: float
    served_by: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One reader for the life of the service."""
    async with StateReader(source.config, key=str, value=Account) as app.state.accounts:
        yield


app = FastAPI(title="bank queries", lifespan=lifespan)


@app.exception_handler(NotOwned)
@app.exception_handler(NotCaughtUp)
@app.exception_handler(BrokerUnavailable)
async def unavailable(request: Request, error: Exception) -> Response:
    """Say that no member answers."""
    return JSONResponse({"detail": str(error)}, 503)


@app.get("/accounts/{name}")
async def balance(
    request: Request, name: str, max_staleness: Annotated[float | None, Query(ge=0.1)] = None, confirm: bool = False
) -> Balance:
    """Return the balance of one account."""
    accounts: StateReader[str, Account] = request.app.state.accounts
    answer = await accounts.get(name, max_staleness=max_staleness, confirm=confirm, timeout_seconds=TIMEOUT_SECONDS)
    if answer.value is None:
        raise HTTPException(404, f"there is no account {name!r}")
    return Balance(account=name, cents=answer.value.cents, as_of=answer.as_of, served_by=answer.served_by)
