"""``examples.shop`` on a real broker: orders, payments and customers at once, and workers that are killed."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Producer

from examples import shop
from examples.shop import Customer, Invoice, OrderPlaced, Paid
from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from tests.broker.battery_kit import PATIENCE, wait_until
from tests.broker.examples_kit import Make, example

__all__ = ["example"]  # a fixture

pytestmark = [pytest.mark.broker, pytest.mark.timeout(480)]


@pytest.mark.nightly
def test_each_order_has_one_invoice_and_one_more_if_it_is_unpaid_when_its_customer_moves(
    example: Make, tmp_path: Path
) -> None:
    made = example(shop, shop.invoices)
    people = [f"customer-{number}" for number in range(40)]
    orders = [OrderPlaced(f"o-{number}", people[number % 40], number) for number in range(4_000)]
    producer = Producer({"bootstrap.servers": made.servers, "partitioner": "murmur2_random"})

    def move(customers: list[str], address: str) -> None:
        for customer in customers:
            producer.produce("customers", msgspec.json.encode(Customer(address)), customer)
        assert producer.flush(PATIENCE) == 0

    with contextlib.closing(TopicAdmin(ClientSettings(made.servers))) as admin:
        tables = shop.source.input_topics()
        admin.delete([spec.name for spec in tables], PATIENCE)
        admin.create(tables, PATIENCE)
        move(people[:20], "1 High Street")
        with made.run(tmp_path) as workers:
            made.send((order.customer, order) for order in orders[:2_000])
            made.until_handled(1_000, workers)
            workers.signal()
            made.send((order.customer, order) for order in orders[2_000:])
            move(people[20:], "1 High Street")
            made.until_outputs(shop.invoices, len(orders), workers)
            for order in orders[::3]:
                producer.produce("payments", msgspec.json.encode(Paid(order.order, order.customer)), order.customer)
            assert producer.flush(PATIENCE) == 0
            paid = len(orders[::3])
            wait_until(lambda: sum(admin.committed("shop", "payments").values()) >= paid, "payments are handled")
            workers.signal(1)
            move(people, "2 Low Road")
            made.until_outputs(shop.invoices, 2 * len(orders) - paid, workers)
    found = Counter((one.order, one.address) for one in made.events(shop.invoices, Invoice))
    due = Counter((order.order, "1 High Street") for order in orders)
    due.update((order.order, "2 Low Road") for number, order in enumerate(orders) if number % 3)
    assert found == due
