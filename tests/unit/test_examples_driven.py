"""The examples of work with the world, in virtual time, with crashes in the middle. The world is a function here; that
which needs PostgreSQL is in ``tests/broker/test_examples.py``.

Members crash and freeze, and transactions fail before and after their commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.async_work import (
    call_service,
    chained_stages,
    payment_timeout,
    rate_limit,
    seed_from_database,
    webhooks,
    write_by_key,
)
from examples.async_work.call_service import PaymentFailed, PaymentMade, PaymentRequested
from examples.async_work.chained_stages import Billed, ReadingsUploaded
from examples.async_work.payment_timeout import OrderClosed, OrderPaid, OrderPlaced
from examples.async_work.rate_limit import CallWanted
from examples.async_work.seed_from_database import AccountBalance, MoneyMoved
from examples.async_work.webhooks import ShopRegistered, WebhookDelivered, WebhookGivenUp
from examples.async_work.write_by_key import OrderChanged
from streams.testing import TestDriver

Serve = Callable[[Callable[[httpx.Request], Any]], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Makes a function the service: what clients ask, it answers (a status and JSON) after some virtual time."""

    def serve(answer: Callable[[httpx.Request], tuple[float, int, Any]]) -> None:
        async def handle(request: httpx.Request) -> httpx.Response:
            seconds, status, content = answer(request)
            await asyncio.sleep(seconds)
            return httpx.Response(status, json=content)

        client = functools.partial(httpx.AsyncClient, transport=httpx.MockTransport(handle))
        monkeypatch.setattr(httpx, "AsyncClient", client)

    return serve


@pytest.mark.parametrize("seed", range(5))
def test_calls_are_made_again_after_a_crash_and_take_effect_once(serve: Serve, seed: int) -> None:
    rng, calls = random.Random(seed), Counter[str]()

    def answer(request: httpx.Request) -> tuple[float, int, Any]:
        key = request.headers["Idempotency-Key"]
        calls[key] += 1
        if json.loads(request.content)["customer"] == "customer-6":
            return 0.02, 402, {}
        return (5.0 if rng.random() < 0.1 else 0.02, 503 if rng.random() < 0.3 else 200, {"receipt": key})

    serve(answer)
    requests = [PaymentRequested(f"p-{number}", f"customer-{number % 7}", number) for number in range(60)]
    with TestDriver(call_service.source, seed=seed) as driver:
        trap = driver.at("commit.before", driver.crash)
        keys = {r.payment: driver.send(r, key=r.customer, wait=False).where for r in requests}
        driver.settle()
        assert trap.sprung
        driver.restart()
        driver.settle()
        results = driver.outputs(call_service.RESULTS, PaymentMade, PaymentFailed)
        driver.check()
    assert sorted(result.payment for result in results) == sorted(keys)
    assert calls.total() > len(requests)
    totals = Counter[str]()
    customers = {request.payment: request for request in requests}
    for result in results:
        request = customers[result.payment]
        if isinstance(result, PaymentMade):
            assert request.customer != "customer-6"
            totals[request.customer] += request.cents
            assert (result.receipt, result.total_cents) == (keys[result.payment], totals[request.customer])


@pytest.mark.parametrize("point", ["flush.before", "flush.after", "commit.before", "commit.after"])
def test_an_opening_balance_counts_once(point: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both members share the hints of one process here, so the second one has hints that its store knows nothing of."""
    database = tmp_path / "bank.sqlite"
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE accounts (account TEXT PRIMARY KEY, cents INTEGER NOT NULL)")
        connection.execute("INSERT INTO accounts VALUES ('ada', 500)")
    monkeypatch.setattr(seed_from_database, "DATABASE", str(database))
    seed_from_database.seeded.clear()
    with TestDriver(seed_from_database.source, members=2) as driver:
        trap = driver.at(point, driver.crash)
        for cents in (1, 10, 100):
            driver.send(MoneyMoved("ada", cents), key="ada", wait=False)
            driver.send(MoneyMoved("bob", cents), key="bob", wait=False)
        driver.settle()
        assert trap.sprung
        balances = defaultdict[str, list[int]](list)
        for balance in driver.outputs(seed_from_database.BALANCES, AccountBalance):
            balances[balance.account].append(balance.cents)
        driver.check()
    assert balances == {"ada": [501, 511, 611], "bob": [1, 11, 111]}


def test_stages_in_a_chain_keep_the_order_of_each_meter(serve: Serve) -> None:
    rng = random.Random(7)
    serve(lambda request: (rng.random(), 200, {"cents_per_kwh": 10}))
    with TestDriver(chained_stages.source) as driver:
        driver.at("commit.before", driver.crash)
        for number in range(1, 31):
            table = f"time,watt_hours\n0,{number}000"
            driver.send(ReadingsUploaded(f"meter-{number % 3}", table), key=f"meter-{number % 3}", wait=False)
        driver.settle()
        driver.restart()
        driver.settle()
        bills = driver.outputs(chained_stages.BILLS, Billed)
        driver.check()
    for meter in range(3):
        used = [bill.watt_hours // 1000 for bill in bills if bill.meter == f"meter-{meter}"]
        assert used == [number for number in range(1, 31) if number % 3 == meter]
        assert [bill.owed_cents for bill in bills if bill.meter == f"meter-{meter}"][-1] == 10 * sum(used)


@pytest.mark.parametrize("seed", range(2))
def test_each_order_is_told_with_one_id_and_once_in_the_output(serve: Serve, seed: int) -> None:
    """To shops that fail and hang, are down for hours, or do not want it; the member crashes and stops meanwhile."""
    rng = random.Random(seed)
    ids, first, down = defaultdict[str, set[str]](set), defaultdict[str, list[str]](list), {"dead"}

    def receive(request: httpx.Request) -> tuple[float, int, Any]:
        order = json.loads(request.content)["order"]
        ids[order].add(request.headers["Idempotency-Key"])
        if request.url.host in down:
            return 0.1, 503, {}
        if request.url.host == "gone":
            return 0.1, 410, {}
        what = rng.random()
        if what < 0.25:
            return rng.random(), 500, {}
        if what < 0.3:
            return 100.0, 200, {}  # too late
        if order not in first[request.url.host]:
            first[request.url.host].append(order)
        return rng.random(), 200, {}

    serve(receive)
    shops = ("quick", "slow", "dead", "gone")
    with TestDriver(webhooks.source, seed=seed) as driver:  # one client at a time
        for shop in shops:
            driver.send(ShopRegistered(shop, f"http://{shop}/hook"), key=shop, wait=False)
        for number in range(40):
            shop = shops[number % 4]
            driver.send(webhooks.OrderPaid(shop, f"{shop}-{number}", number), key=shop, wait=False)
        driver.at("commit.before" if seed % 2 else "commit.after", driver.crash, skip=seed)
        for _ in range(8):
            driver.advance(rng.uniform(0.1, 60))
            if driver.members and rng.random() < 0.5:
                rng.choice([driver.crash, driver.leave])()
            if not driver.members:
                driver.restart()

        def told() -> list[Any]:
            return driver.outputs(webhooks.TOLD, WebhookDelivered, WebhookGivenUp)

        assert len(told()) >= 10
        assert [event for event in told() if event.order.startswith("dead")] == []
        down.clear()
        while driver.jobs():
            driver.advance(600)
        ends = told()
        driver.check()
    orders = {shop: [f"{shop}-{number}" for number in range(40) if shops[number % 4] == shop] for shop in shops}
    assert sorted(event.order for event in ends) == sorted(order for each in orders.values() for order in each)
    assert {event.reason for event in ends if isinstance(event, WebhookGivenUp)} == {"HTTPStatusError"}
    for shop in shops:
        assert [event.order for event in ends if event.order in orders[shop]] == orders[shop]
        assert shop == "gone" or first[shop] == orders[shop]
    assert {len(used) for used in ids.values()} == {1}
    assert len({name for used in ids.values() for name in used}) == 40


@pytest.mark.parametrize("is_paid", [False, True])
def test_an_order_is_closed_once(is_paid: bool) -> None:
    with TestDriver(payment_timeout.source, members=2) as driver:
        driver.send(OrderPlaced("o-1", 100), key="o-1")
        if is_paid:
            driver.send(OrderPaid("o-1"), key="o-1")
        driver.advance(payment_timeout.TIME_TO_PAY_SECONDS - 60)
        owner = next(number for number in driver.members if driver.statistics(number).partitions)
        driver.crash(owner)
        assert driver.outputs(payment_timeout.OUTCOMES, OrderClosed) == [OrderClosed("o-1", "paid")][: int(is_paid)]
        driver.restart(owner)
        driver.at("commit.before", driver.crash)
        driver.advance(120)
        driver.settle()
        outcome = "paid" if is_paid else "cancelled"
        assert driver.outputs(payment_timeout.OUTCOMES, OrderClosed) == [OrderClosed("o-1", outcome)]
        driver.send(OrderPaid("o-1"), key="o-1")
        assert driver.outputs(payment_timeout.OUTCOMES, OrderClosed)[1:] == [OrderClosed("o-1", "refund")]
        driver.check()


@pytest.mark.parametrize("skip", [0, 3, 9])
def test_a_limit_holds_over_a_crash(skip: int) -> None:
    calls = [CallWanted("ada", str(number)) for number in range(40)]
    a_token = rate_limit.A_TOKEN.total_seconds()
    with TestDriver(rate_limit.source, members=2) as driver:
        began = driver.now
        for call in calls:
            driver.send(call, key="ada", wait=False)
        trap = driver.at("commit.before", driver.crash, skip=skip)
        made = 0
        while made < len(calls) and driver.now < began + 60:
            driver.advance(0.05)
            made = len(driver.outputs(rate_limit.CALLS))
            assert made <= rate_limit.BURST + (driver.now - began) / a_token
        driver.settle()
        assert trap.sprung
        assert driver.outputs(rate_limit.CALLS, CallWanted) == calls
        driver.check()


def test_more_than_may_wait_is_refused() -> None:
    with TestDriver(rate_limit.source) as driver:
        for number in range(rate_limit.BURST + rate_limit.MOST_WAITING + 5):
            driver.send(CallWanted("ada", str(number)), key="ada", wait=False)
        driver.settle()
        assert len(driver.outputs(rate_limit.REFUSED)) in range(1, 6)


@pytest.mark.parametrize("seed", range(5))
def test_rows_change_once_per_event(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tmp_path / "orders.sqlite"
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(write_by_key.TABLE)
        connection.execute("CREATE TABLE history (id TEXT, cents INTEGER)")
        for verb in ("INSERT", "UPDATE"):
            connection.execute(
                f"CREATE TRIGGER after_{verb} AFTER {verb} ON orders "
                "BEGIN INSERT INTO history VALUES (new.id, new.cents); END"
            )
    monkeypatch.setattr(write_by_key, "DATABASE", str(database))
    with TestDriver(write_by_key.source, members=2, seed=seed) as driver:
        trap = driver.at("commit.before", driver.crash)
        for number in range(200):
            driver.send(OrderChanged(f"order-{number % 9}", "paid", number), key=f"order-{number % 9}", wait=False)
        driver.settle()
        assert trap.sprung
        driver.check()
    with contextlib.closing(sqlite3.connect(database)) as connection:
        history = connection.execute("SELECT id, cents FROM history ORDER BY rowid").fetchall()
    for order in range(9):
        changes = [cents for name, cents in history if name == f"order-{order}"]
        assert changes == [number for number in range(200) if number % 9 == order]
