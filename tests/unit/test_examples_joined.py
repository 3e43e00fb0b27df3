"""The examples of several inputs, joined tables and the loop, in virtual time, with crashes in the middle."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from examples import clicks, messaging, shop
from examples.messaging import LEAST_MESSAGES, Message, UserBlocked, WordTranslated
from examples.shop import Customer, Invoice, OrderPlaced, Paid
from streams.testing import TestDriver


def state(driver: TestDriver[Any], partitions: int) -> dict[str, Any]:
    """The committed state of all partitions."""
    return {key: row for number in range(partitions) for key, row in driver.restored_store(number).items()}


def test_clicks_are_counted_once() -> None:
    users = [f"user-{number % 10}" for number in range(100)]
    with TestDriver(clicks.source, members=2) as driver:
        trap = driver.at("commit.after", driver.crash)
        for user in users:
            driver.send(clicks.Clicked(user, "a button"), key=user, wait=False)
        driver.settle()
        assert trap.sprung
        assert {user: row.clicks for user, row in state(driver, 8).items()} == Counter(users)
        driver.check()


def invoices(driver: TestDriver[Any]) -> list[tuple[str, str, int]]:
    return [(one.order, one.address, one.cents) for one in driver.outputs(shop.invoices, Invoice)]


@pytest.mark.parametrize("point", ["commit.before", "commit.after"])
def test_an_order_waits_for_its_customer_and_unpaid_invoices_follow_the_address(point: Any) -> None:
    with TestDriver(shop.source, topics={"invoices": 4}, members=2) as driver:
        driver.send(OrderPlaced("o-1", "ann", 500), key="ann")
        assert invoices(driver) == []
        trap = driver.at(point, driver.crash)
        customers = driver.table("customers")
        customers.put("ann", Customer("1 High Street"))
        assert trap.sprung
        driver.send(OrderPlaced("o-2", "ann", 700), key="ann")
        driver.send(Paid("o-1", "ann"), key="ann", topic=shop.payments)
        customers.put("ann", Customer("1 High Street"))
        customers.put("ann", Customer("2 Low Road"))
        customers.delete("ann")
        assert invoices(driver) == [("o-1", "1 High Street", 500), ("o-2", "1 High Street", 700),
                                    ("o-2", "2 Low Road", 700)]  # fmt: skip
        driver.check()


def test_messages_are_dropped_and_translated_by_the_tables_of_other_sources() -> None:
    with TestDriver(messaging.messages, topics={messaging.RECEIVED: 4}) as driver:
        blocks = driver.table(messaging.blocker.config.changelog)
        dictionaries = driver.table(messaging.translator.config.changelog)
        dictionaries.put("ann", {"hi": "hello"})
        blocks.put("bob", True)
        for sender in ("ann", "bob"):
            driver.send(Message(sender, "eve", "hi eve"), key=sender)
        blocks.put("bob", False)
        driver.send(Message("bob", "eve", "hi again"), key="bob")
        assert driver.outputs(messaging.RECEIVED, Message) == [
            Message("ann", "eve", "hello eve"),
            Message("bob", "eve", "hi again"),
        ]
        driver.check()


def test_the_tables_that_are_joined_are_those_of_the_two_sources() -> None:
    with TestDriver(messaging.blocker) as driver:
        driver.send(UserBlocked("bob"), key="bob")
        assert state(driver, messaging.PARTITIONS) == {"bob": True}
    with TestDriver(messaging.translator) as driver:
        for word, translation in (("hi", "hello"), ("bye", "farewell")):
            driver.send(WordTranslated("ann", word, translation), key="ann")
        assert state(driver, messaging.PARTITIONS) == {"ann": {"hi": "hello", "bye": "farewell"}}


def test_a_spammer_is_blocked_once() -> None:
    rng = random.Random(3)
    with TestDriver(messaging.detector, topics={messaging.BLOCKS: 4}, members=2) as driver:
        trap = driver.at("commit.before", driver.crash, skip=3)
        for number in range(LEAST_MESSAGES + 50):
            driver.send(Message("spammer", f"user-{number % 7}", "buy"), key="spammer", wait=False)
            if rng.random() < 0.3:
                driver.send(Message("ann", "bob", "hi"), key="ann", wait=False)
        driver.settle()
        assert trap.sprung
        assert driver.outputs(messaging.BLOCKS, UserBlocked) == [UserBlocked("spammer")]
        counts = state(driver, messaging.PARTITIONS)
        assert (counts["spammer"].sent, counts["bob"].received) == (LEAST_MESSAGES + 50, counts["ann"].sent)
        driver.check()
