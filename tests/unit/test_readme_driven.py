"""What the README shows of concurrent handlers and of tests, run as it stands there."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from examples import bank
from examples.bank import Deposited
from streams import EventContext, EventSource, EventSourceConfig, event_type
from streams.testing import TestDriver

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


@event_type("ReadmeAssessment")
class Assessment(msgspec.Struct, frozen=True):
    account: str
    risk: int


@event_type("ReadmeReview")
class Review(msgspec.Struct, frozen=True):
    account: str


def block_with(text: str) -> str:
    """The one block of Python that has this text."""
    (found,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if text in block)
    return str(found)


def test_the_test_that_is_shown() -> None:
    exec(block_with("TestDriver(source)"), {"source": bank.source, "Deposited": Deposited, "Balance": bank.Balance})


def test_the_concurrent_handler_that_is_shown() -> None:
    source = EventSource(EventSourceConfig(group_id="risk", topic="deposits", num_partitions=2))
    reviewed: list[tuple[str, float]] = []

    async def ask_the_risk_service(event: Deposited) -> int:
        return event.cents // 100

    @source.register_event_type(Review)
    def on_review(ctx: EventContext[Any], event: Review) -> None:
        reviewed.append((event.account, driver.now))

    names = {"Assessment": Assessment, "Context": EventContext, "Deposited": Deposited, "EventContext": EventContext}
    names |= {"Review": Review, "ask_the_risk_service": ask_the_risk_service, "source": source, "timedelta": timedelta}
    shown = block_with("concurrency=64")
    assert shown.count("timedelta(days=1)") == 1
    exec(shown.replace("timedelta(days=1)", "timedelta(minutes=5)"), names)  # a day of heartbeats takes 20 s
    with TestDriver(source) as driver:
        for account in ("ada", "bob", "ada"):
            driver.send(Deposited(account, 500), key=account)
        assert sorted(driver.outputs("assessments", Assessment), key=lambda event: event.account) == [
            Assessment("ada", 5),
            Assessment("ada", 5),
            Assessment("bob", 5),
        ]
        driver.advance(timedelta(minutes=5).total_seconds() + 1)
    assert [account for account, _ in reviewed] == ["bob", "ada"], "set again, a timer is the later one"
