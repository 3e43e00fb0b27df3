"""The guide of replays: its Python runs as it stands there, from top to bottom, beside a bank that was at work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from examples import bank, bank_feed
from examples.topics import create_topics
from streams import EventSource
from streams.broker import KafkaBroker
from tests.broker.engine_kit import Running
from tests.spark.test_guide import GUIDES, blocks, run

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(500)]
DEPOSITS = 2_000


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with KafkaBroker() as broker:  # the guide's topics have plain names
        yield broker.bootstrap_servers


def test_the_python_of_the_guide_runs(servers: str, tmp_path: Path) -> None:
    create_topics(servers, {"bank-events": 10, "bank-balances": 10})
    bank_feed.pay_in(servers, DEPOSITS, seed=1)
    config = msgspec.structs.replace(bank.source.config, bootstrap_servers=servers)
    source = EventSource(config, bank.source._store_factory)
    source.register_event_type(bank.Deposited, bank.on_deposited)

    async def handle_all() -> None:
        async with Running(source) as running:
            await running.until_committed(DEPOSITS)

    asyncio.run(handle_all())
    shown = run(blocks(GUIDES / "spark-replay.md"), tmp_path, servers)
    assert "the stores of production are those of its history: True" in shown
    assert (
        f"production is what its own handlers give: Comparison(same={DEPOSITS}, missing=0, extra=0, different=0)"
        in shown
    )
    assert "with the bonus: Comparison(" in shown
    assert shown.rstrip().splitlines()[-1].startswith("True ")
