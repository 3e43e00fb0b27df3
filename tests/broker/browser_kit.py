"""Debian's Chromium under Playwright, with everything noted that a good page does not do."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

playwright = pytest.importorskip("playwright.async_api")

from playwright.async_api import ConsoleMessage, Page, Request, async_playwright, expect  # noqa: E402

__all__ = ["Watched", "chromium", "expect"]

CHROMIUM = Path("/usr/bin/chromium")
# As root it has no sandbox of its own; the rest keeps it from asking its maker's hosts.
OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
SECONDS = 30.0
expect.set_options(timeout=SECONDS * 1000)


class Watched:
    """A page. ``complaints``: what its console said. ``hosts``: of all its requests."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.addresses: list[str] = []
        page.set_default_timeout(SECONDS * 1000)
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._sent)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _sent(self, request: Request) -> None:
        self.addresses.append(request.url)
        self.hosts.add(urlsplit(request.url).netloc)

    def check(self, port: int) -> None:
        """Nothing was complained of, and no other host was asked."""
        assert self.complaints == []
        assert self.hosts == {f"127.0.0.1:{port}"}


@asynccontextmanager
async def chromium(width: int = 1280, height: int = 900) -> AsyncIterator[Watched]:
    """A page in a browser of its own. Skips where there is no Chromium, unless ``BROWSER_TESTS=required``."""
    if not CHROMIUM.exists():
        reason = f"{CHROMIUM} is not there: apt-get install chromium"
        if os.environ.get("BROWSER_TESTS") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=str(CHROMIUM), args=OPTIONS)
        try:
            context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme="light")
            yield Watched(await context.new_page())
        finally:
            await browser.close()
