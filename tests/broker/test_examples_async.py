"""The examples that talk to services, on a real broker: workers are killed under load, outcomes are counted."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.async_work import call_service, chained_stages, payment_timeout, rate_limit, retry_later
from examples.async_work.call_service import PaymentFailed, PaymentMade, PaymentRequested
from examples.async_work.chained_stages import Billed, ReadingsUploaded, UploadRefused
from examples.async_work.payment_timeout import OrderClosed, OrderPaid, OrderPlaced
from examples.async_work.rate_limit import CallWanted
from examples.async_work.retry_later import GivenUp, Scored, Transfer
from tests.broker.battery_kit import seed_of
from tests.broker.examples_kit import Make, example
from tests.broker.http_service import Service, score_of, tariff_of

__all__ = ["example"]  # a fixture

pytestmark = [pytest.mark.broker, pytest.mark.timeout(480)]


GIVEN_UP = ("Unavailable", "TimeoutError")
"""After six attempts that were answered with 503 (one in 4,096), or not in time (all, if the service stands still)."""


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(seed_of()) as service:
        yield service


def test_a_call_per_event(example: Make, service: Service, tmp_path: Path) -> None:
    payments = example(call_service, call_service.RESULTS, PAYMENTS_URL=service.url)
    rng = random.Random(seed_of())
    customers = [*(f"customer-{number}" for number in range(40)), "declined"]
    requests = [PaymentRequested(f"p-{n}", rng.choice(customers), rng.randrange(1, 100)) for n in range(400)]
    payments.send((request.customer, request) for request in requests)
    with payments.run(tmp_path) as workers:
        payments.until_outputs(call_service.RESULTS, 50, workers)
        workers.kill()
        payments.until_outputs(call_service.RESULTS, len(requests), workers)
    results = payments.events(call_service.RESULTS, PaymentMade, PaymentFailed)
    outcome = {result.payment: result for result in results}
    assert len(results) == len(outcome) == len(requests), "each payment has one result"

    records = payments.records("payment-requests")
    keys = {
        record.where: request
        for record, request in zip(records, payments.events("payment-requests", PaymentRequested), strict=True)
    }
    charged = {keys[key].payment: key for key in service.charged}
    assert sum(service.calls.values()) > len(requests), "calls are made again; that is what the keys are for"
    expected: dict[str, list[str]] = defaultdict(list)
    totals: dict[str, int] = defaultdict(int)
    for request in requests:
        result = outcome[request.payment]
        if isinstance(result, PaymentMade):
            totals[request.customer] += request.cents
            assert result.receipt == f"receipt of {charged[request.payment]}"
            assert result.total_cents == totals[request.customer]
        elif request.customer == "declined":
            assert result.reason in ("HTTPStatusError", *GIVEN_UP)
        else:
            assert result.reason in GIVEN_UP
        expected[request.customer].append(request.payment)
    for customer, wanted in expected.items():
        seen = [keys[key].payment for key, (name, _) in service.charged.items() if name == customer]
        assert seen == [payment for payment in wanted if payment in charged], (
            "in order per customer, also at the service"
        )
        assert [r.payment for r in results if r.payment in set(wanted)] == wanted
    assert {p for p, r in outcome.items() if isinstance(r, PaymentMade)} <= charged.keys()


def test_chained_stages(example: Make, service: Service, tmp_path: Path) -> None:
    billing = example(chained_stages, chained_stages.BILLS, TARIFFS_URL=service.url)
    rng = random.Random(seed_of())
    uploads = []
    for number in range(300):
        hours = [rng.randrange(1000) for _ in range(20)]
        text = "\n".join(["time,watt_hours", *(f"{hour},{used}" for hour, used in enumerate(hours))])
        uploads.append((ReadingsUploaded(f"meter-{rng.randrange(30)}", text), sum(hours)))
        if number % 50 == 7:
            uploads.append((ReadingsUploaded(f"meter-{rng.randrange(30)}", "time,watt_hours\n0,unknown"), -1))
    billing.send((upload.meter, upload) for upload, _ in uploads)
    with billing.run(tmp_path) as workers:
        billing.until_outputs(chained_stages.BILLS, 30, workers)
        workers.kill()
        billing.until_outputs(chained_stages.BILLS, len(uploads), workers)
    expected: dict[str, list[object]] = defaultdict(list)
    owed: dict[str, int] = defaultdict(int)
    for upload, used in uploads:
        if used < 0:
            refused = UploadRefused(upload.meter, "invalid literal for int() with base 10: 'unknown'")
            expected[upload.meter].append(refused)
            continue
        cents = used * tariff_of(upload.meter) // 1000
        owed[upload.meter] += cents
        expected[upload.meter].append(Billed(upload.meter, used, cents, owed[upload.meter]))
    found: dict[str, list[object]] = defaultdict(list)
    for event in billing.events(chained_stages.BILLS, Billed, UploadRefused):
        found[event.meter].append(event)
    assert found == expected


def test_failed_events_are_tried_again_later(example: Make, service: Service, tmp_path: Path) -> None:
    scoring = example(retry_later, retry_later.SCORED, SCORES_URL=service.url)
    rng = random.Random(seed_of())
    transfers = [Transfer(f"t-{number}", f"account-{rng.randrange(40)}", 100) for number in range(200)]
    transfers.insert(20, Transfer("poison", "account-1", 100))
    scoring.send((transfer.account, transfer) for transfer in transfers)
    with scoring.run(tmp_path) as workers:
        scoring.until_outputs(retry_later.SCORED, 100, workers)
        workers.kill()
        scoring.until_outputs(retry_later.SCORED, len(transfers), workers)
    expected: dict[str, list[str]] = defaultdict(list)
    for transfer in transfers:
        expected[transfer.account].append(transfer.transfer)
    found: dict[str, list[str]] = defaultdict(list)
    for event in scoring.events(retry_later.SCORED, Scored, GivenUp):
        if isinstance(event, GivenUp):
            assert event.attempts == retry_later.MOST_ATTEMPTS
            assert "503" in event.reason or "TimeoutError" in event.reason
            found[event.transfer.account].append(event.transfer.transfer)
        else:
            assert event.score == score_of(event.transfer)
            found[event.account].append(event.transfer)
    assert found == expected, "each once, in the order of its account, whatever failed in between"
    assert service.calls["poison"] >= retry_later.MOST_ATTEMPTS


def test_orders_that_nobody_pays_are_cancelled(example: Make, tmp_path: Path) -> None:
    # More than a busy machine stands still for: those that are paid are to be paid in time.
    orders = example(payment_timeout, payment_timeout.OUTCOMES, TIME_TO_PAY_SECONDS="15")
    names = [f"order-{number}" for number in range(200)]
    paid, unpaid = names[::2], names[1::2]
    orders.send((name, OrderPlaced(name, 100)) for name in names)
    with orders.run(tmp_path) as workers:
        orders.until_handled(len(names), workers)
        orders.send((name, OrderPaid(name)) for name in paid)
        orders.until_outputs(payment_timeout.OUTCOMES, len(paid), workers)
        workers.kill()  # with timers set
        orders.until_outputs(payment_timeout.OUTCOMES, len(names), workers)
        orders.send((name, OrderPaid(name)) for name in unpaid[:1])
        orders.until_outputs(payment_timeout.OUTCOMES, len(names) + 1, workers)
    outcomes: dict[str, list[str]] = defaultdict(list)
    for event in orders.events(payment_timeout.OUTCOMES, OrderClosed):
        outcomes[event.order].append(event.outcome)
    assert {name: outcomes[name] for name in paid} == {name: ["paid"] for name in paid}
    assert outcomes[unpaid[0]] == ["cancelled", "refund"], "the money came too late"
    assert {name: outcomes[name] for name in unpaid[1:]} == {name: ["cancelled"] for name in unpaid[1:]}


def test_no_customer_calls_more_often_than_agreed(example: Make, tmp_path: Path) -> None:
    limiter = example(rate_limit, rate_limit.CALLS, rate_limit.REFUSED)
    wanted = [CallWanted(f"customer-{number % 8}", str(number)) for number in range(8 * 40)]
    limiter.send((call.customer, call) for call in wanted)
    with limiter.run(tmp_path) as workers:
        limiter.until_outputs(rate_limit.CALLS, 8 * rate_limit.BURST + 20, workers)
        workers.kill()
        limiter.until_outputs(rate_limit.CALLS, len(wanted), workers)
    made: dict[str, list[str]] = defaultdict(list)
    for call in limiter.events(rate_limit.CALLS, CallWanted):
        made[call.customer].append(call.text)
    asked: dict[str, list[str]] = defaultdict(list)
    for call in wanted:
        asked[call.customer].append(call.text)
    assert made == asked, "each once, in order"
    assert limiter.records(rate_limit.REFUSED) == []
