"""``examples.conversion``: reference data in a global view, joined in handlers of workers that are killed."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from examples import conversion, conversion_rates
from examples.conversion import Booked, Paid, Rate
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from tests.broker.examples_kit import Make, example

__all__ = ["example"]

pytestmark = [pytest.mark.broker, pytest.mark.timeout(480)]

HOUR_MS = 3_600_000


@pytest.mark.nightly
def test_every_payment_is_booked_once_with_the_rate_of_its_time(example: Make, tmp_path: Path) -> None:
    shop = example(conversion, "bookings")
    with contextlib.closing(TopicAdmin(ClientSettings(shop.servers))) as admin:
        admin.delete([conversion.RATES])
    conversion_rates.create_topic(shop.servers)
    conversion_rates.create_topic(shop.servers)  # harmless
    now = int(time.time() * 1000)
    old = [Rate("EUR", now - 9 * HOUR_MS, 1_000_000), Rate("USD", now - 9 * HOUR_MS, 500_000)]
    today = [Rate("USD", now - HOUR_MS, 920_000)]
    later = [Rate("USD", now + 1000 * HOUR_MS, 1)]  # known already, not valid yet
    conversion_rates.write(shop.servers, [*old, *today, *later])
    shop.send((f"a{n % 7}", Paid(f"a{n % 7}", "USD" if n % 2 else "EUR", 100)) for n in range(70))
    with shop.run(tmp_path) as workers:
        shop.until_outputs("bookings", 70, workers)
        workers.signal()
        shop.send([("x", Paid("x", "XXX", 100))])  # nobody ever says what it is worth
        shop.send((f"a{n % 7}", Paid(f"a{n % 7}", "USD", 100)) for n in range(7))
        shop.until_outputs("bookings", 77, workers)
        conversion_rates.write(shop.servers, [Rate("CHF", now - HOUR_MS, 1_050_000)])  # while it runs
        shop.send((f"a{n % 7}", Paid(f"a{n % 7}", "CHF", 100)) for n in range(7))
        shop.until_outputs("bookings", 84, workers)
        shop.until_outputs(shop.source.config.dead_letters, 1, workers)
    booked: list[Booked] = shop.events("bookings", Booked)
    assert len(booked) == 84
    assert {(b.rate.currency, b.rate.micros, b.cents) for b in booked} == {
        ("EUR", 1_000_000, 100), ("USD", 920_000, 92), ("CHF", 1_050_000, 105),
    }  # fmt: skip
    for account in {b.account for b in booked}:
        mine = [b for b in booked if b.account == account]
        assert [b.balance for b in mine] == [sum(b.cents for b in mine[: n + 1]) for n in range(len(mine))]
        assert len(mine) == 12
