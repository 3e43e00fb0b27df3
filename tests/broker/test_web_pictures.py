"""Pictures of the monitor's pages, of a group of three members under load."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams.records import TYPE_HEADER
from streams.sak.murmur2 import partition_of
from streams.testing.fixtures import BrokerAddress
from tests.broker.browser_kit import chromium, expect
from tests.broker.engine_kit import Lab
from tests.broker.kes_kit import ROOT, KesRun
from tests.unit.private_kit import private
from tests.unit.waiting import until

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(300)]

shop: Any = pytest.importorskip("tests.broker.pictured_shop")
PICTURES = ROOT / "docs" / "pictures"
SECONDS = 45
"""Of load, so that the line of rates has a form."""
PLACES = {
    "overview": "",
    "source": "source",
    "state": "state?key=customer-17&confirm=true",
    "dead-letters": "dead-letters",
    "actions": "actions",
}


async def test_pictures_of_the_pages(kafka_broker: BrokerAddress, tmp_path: Path) -> None:
    """With ``MONITOR_PICTURES=1`` they are those of the guide."""
    folder = PICTURES if os.environ.get("MONITOR_PICTURES") else tmp_path
    lab = Lab(kafka_broker.bootstrap_servers, "", shop.PARTITIONS)
    await lab.create(shop.TOPIC, shop.INVOICES)
    token = "a-token-of-the-test-itself"
    tokens, secret = private(tmp_path / "token", token), private(tmp_path / "secret", "the secret of this group")
    servers = {"KES_BOOTSTRAP_SERVERS": lab.bootstrap, "KES_QUERIES_SECRET_FILE": str(secret)}
    options = ["--http", "127.0.0.1:0", "--http-tokens", str(tokens), "--queries", "127.0.0.1:0"]
    running = KesRun("tests.broker.pictured_shop:source", 3, tmp_path / "log", tmp_path, servers, options)
    rng = random.Random(1)

    async def send(customer: str, event: msgspec.Struct) -> None:
        headers = [(TYPE_HEADER, type(event).__name__.encode())]
        place = partition_of(customer.encode(), shop.PARTITIONS)
        await lab.send(msgspec.json.encode(event), customer.encode(), headers, place, shop.TOPIC)

    async def load(seconds: float) -> None:
        for turn in range(int(seconds / 0.1)):
            for _ in range(rng.randrange(5 + turn % 90)):
                customer = f"customer-{rng.randrange(400)}"
                await send(customer, shop.Ordered(customer, rng.randrange(100, 10_000)))
            await lab.flush()
            await asyncio.sleep(0.1)

    try:
        await until(lambda: bool(running.said("monitor")), "it says its address", 60.0)
        address = running.said("monitor")[0]["address"]
        async with chromium(height=420) as watched:
            page = watched.page
            await page.goto(f"{address}login#{token}")
            await expect(page.locator("tr[id^=m-w-]", has_text="running")).to_have_count(3)
            await load(SECONDS)
            for number in (17, 54):
                await send(f"customer-{number}", shop.Ordered(f"customer-{number}", -100 * number))
            for number in range(200):  # which are under way for some time
                await send(f"customer-{number}", shop.Reserved(f"customer-{number}"))
            await lab.flush()
            await page.goto(f"{address}actions")
            await page.get_by_label("index").fill("by name")
            await page.get_by_role("button", name="Start rebuild-index").click()
            loading = asyncio.create_task(load(SECONDS))
            for name, place in PLACES.items():
                await page.goto(f"{address}{place}")
                if name in ("overview", "source"):
                    await expect(page.locator("#connection")).to_have_text("live")
                if name == "source":
                    await expect(page.get_by_role("heading", name="Async work")).to_be_visible()
                    await expect(page.locator(".headline")).not_to_contain_text(", 0 behind")
                elif name == "state":
                    await expect(page.locator("#value")).to_contain_text("orders")
                elif name == "dead-letters":
                    await expect(page.locator(".letter")).to_have_count(2)
                picture = folder / f"monitor-{name}.png"
                await page.screenshot(path=str(picture), full_page=True)
                assert picture.stat().st_size > 10_000
                assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} overflows"
            loading.cancel()
            watched.check(int(address.rstrip("/").rpartition(":")[2]))
        assert running.stop() == 0
    finally:
        running.close()
