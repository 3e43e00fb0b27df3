"""A web service that takes deposits: each answer comes when all in-sync replicas have the event.

pip install fastapi uvicorn
KES_BOOTSTRAP_SERVERS=127.0.0.1:9092 uvicorn examples.web_service:app

curl -X POST 127.0.0.1:8000/accounts/ada/deposits -H 'content-type: application/json' -d '{"cents": 500}'
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel

from examples.bank import Deposited
from streams import EventProducer
from streams.errors import BrokerUnavailable, RecordRefused
from streams.source import AsyncEventProducer

TIMEOUT_SECONDS = 10.0
"""How long a deposit is tried; then the answer is 503."""


class Deposit(BaseModel):
    """The body of a request."""

    cents: int


class Accepted(BaseModel):
    """Where the event is: readers that have come so far have seen it."""

    partition: int
    offset: int


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One producer for the life of the service. Its end waits for the records on their way."""
    async with EventProducer(delivery_timeout_seconds=TIMEOUT_SECONDS) as app.state.producer:
        yield


app = FastAPI(title="bank", lifespan=lifespan)


@app.post("/accounts/{account}/deposits", status_code=202)
async def deposit(account: str, body: Deposit, request: Request) -> Accepted:
    """Place a deposit."""
    producer: AsyncEventProducer = request.app.state.producer
    try:
        sent = await producer.send("bank-events", Deposited(account, body.cents), key=account)
    except RecordRefused as error:
        raise HTTPException(422, f"not accepted: {error}") from error
    except (
        BrokerUnavailable
    ) as error:  # a client that asks again may deposit twice: give deposits an id, and look at it
        raise HTTPException(503, "no answer in time: the deposit may be accepted or not") from error
    return Accepted(partition=sent.partition, offset=sent.offset)
