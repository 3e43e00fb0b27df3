"""The monitor in a real browser, of sources on a real broker."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest

from streams import DEAD_LETTER, EventSource, Table, View
from streams.sak.murmur2 import partition_of
from streams.settings.groups import QueryConfig
from streams.testing.fixtures import BrokerAddress
from tests.broker.browser_kit import Watched, chromium, expect
from tests.broker.engine_kit import Lab, Running, picky
from tests.broker.kes_kit import ROOT, KesRun
from tests.unit.private_kit import private
from tests.unit.waiting import until
from tests.unit.web_kit import ask
from tests.vocabulary import Added

from streams.queries import QueryServer  # isort: skip
from streams.web import ActionRun, Monitor  # isort: skip

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

PARTITIONS = 4
PAGES = ["overview", "source", "views", "state", "dead letters", "parked keys", "jobs", "actions", "settings"]
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e&\"'</script>"
SHOWN = "<img src=x onerror=alert(1)>\\x1b[31m\\u202e&\"'</script>"


class Rebuild(msgspec.Struct, frozen=True):
    """The argument of an action."""

    index: str
    rows: int = 10


def with_action(monitor: Monitor) -> Monitor:
    @monitor.action("rebuild-index")
    async def rebuild(order: Rebuild, run: ActionRun) -> str:
        """Write an index anew, from the state."""
        for row in range(1_000):
            run.progress(row, 1_000, order.index)
            await asyncio.sleep(0.1)
        return "never"

    return monitor


@asynccontextmanager
async def signed_in(monitor: Monitor) -> AsyncIterator[Watched]:
    """A browser that has followed the link."""
    async with chromium() as watched:
        await watched.page.goto(monitor.link)
        await expect(watched.page).to_have_url(monitor.address)
        yield watched


async def test_a_source_in_the_browser(lab: Lab) -> None:
    await lab.create()
    source = picky(lab, {"is": True})
    monitor = with_action(Monitor(source, address="127.0.0.1:0"))
    async with monitor, Running(source) as running, signed_in(monitor) as watched:
        page, token = watched.page, monitor.link.partition("#")[2]
        assert not [address for address in watched.addresses if token in address.partition("#")[0]]
        assert token not in await page.content()
        [cookie] = await page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], token in cookie["value"]) == (True, "Strict", False)
        assert await page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"

        await expect(page.locator("#connection")).to_have_text("live")
        events = page.locator("td.events").first
        await expect(events).to_have_text("0")
        await lab.add(*"abcdefghij")
        await running.until_committed(10)
        await expect(events).to_have_text("10")
        for name in PAGES:
            await page.get_by_role("link", name=name, exact=True).click()
            await expect(page.get_by_role("heading", level=1)).to_have_text(name.capitalize())
        await page.goto(f"{monitor.address}source")
        position = page.locator("#p--0 td.position")
        await expect(position).to_have_text(re.compile("1[0-9]"))  # the markers of transactions count
        before = await position.text_content()
        await lab.add(*"abc")
        await expect(position).not_to_have_text(before or "")

        await page.goto(f"{monitor.address}actions")
        await page.get_by_label("index").fill("by name")
        await page.get_by_role("button", name="Start rebuild-index").click()
        run = page.locator("#run-rebuild-index-1")
        await expect(run.locator(".state")).to_have_text("running")
        await expect(run).to_contain_text("by name")
        await expect(run).to_contain_text(re.compile(r"[1-9]\d* of 1,000"))
        await page.get_by_role("button", name="Cancel rebuild-index").click()
        await expect(run.locator(".state")).to_have_text("cancelled")
        await page.get_by_role("button", name="Sign out").click()
        await expect(page).to_have_url(f"{monitor.address}login")
        await page.goto(f"{monitor.address}source")
        await expect(page).to_have_url(f"{monitor.address}login")
        watched.check(monitor.port)
        drain = "/api/v1/actions/drain-this-member/start"
        assert (await asyncio.to_thread(ask, monitor.port, drain, token, method="POST")).status == 200
        await asyncio.wait_for(source.wait_stopped(), 30.0)


@pytest.mark.nightly
async def test_a_key_is_looked_up_at_its_owner_whichever_member_is_asked(lab: Lab, tmp_path: Path) -> None:
    """Two members with a monitor each; and the state of a partition is looked up at both."""
    await lab.create()
    secret = str(private(tmp_path / "secret", "the secret of this group"))
    sources = []
    for _ in range(2):
        source = EventSource(lab.config(queries=QueryConfig(secret_file=secret)), Table.factory(key=str, value=str))
        source.register_event_type(Added, lambda ctx, event: ctx.store.put(event.name, event.deed))
        sources.append(source)
    names = [HOSTILE, *"abcdef"]
    for name in names:
        await lab.add(name, deed=f"deed of {name}", partition=partition_of(name.encode(), PARTITIONS))
    await lab.flush()
    async with AsyncExitStack() as stack:
        runs = []
        for source in sources:
            stack.enter_context(QueryServer(source, "127.0.0.1:0"))
            runs.append(await stack.enter_async_context(Running(source, active=0)))
        await runs[1].until(lambda: len(runs[1].numbers) == PARTITIONS // 2, "each has its half")
        owners = set()
        for source in sources:
            monitor = await stack.enter_async_context(Monitor(source, address="127.0.0.1:0"))
            watched = await stack.enter_async_context(signed_in(monitor))
            page = watched.page
            for name in names:
                await page.get_by_role("link", name="state", exact=True).click()
                await page.get_by_role("textbox", name="key").first.fill(name)
                if name == "a":
                    await page.get_by_role("checkbox", name="confirm by a commit").check()
                await page.get_by_role("button", name="Look up").click()
                shown = name.replace(HOSTILE, SHOWN)
                await expect(page.locator("#value")).to_have_text(f"deed of {shown}")
                await expect(page.locator("h3")).to_have_text(shown)
                proof = await page.locator("#proof").text_content() or ""
                owners |= {each.config.instance_id for each in sources if each.config.instance_id in proof}
                assert ("confirmed by a commit" in proof) == (name == "a")
                assert f"{lab.topic}[{partition_of(name.encode(), PARTITIONS)}]" in proof
            await page.goto(f"{monitor.address}state?key=nobody")
            await expect(page.locator("#value")).to_have_text(f"no such key: in none of the {PARTITIONS} partitions")
            assert await page.locator("main img, main script").count() == 0
            watched.check(monitor.port)
        assert owners == {source.config.instance_id for source in sources}


@pytest.mark.nightly
async def test_hostile_keys_and_values_are_plain_text_and_letters_are_sent_again(lab: Lab) -> None:
    await lab.create()
    broken = {"is": True}
    source = picky(lab, broken, decode_policy=DEAD_LETTER)
    view = View.of(source)
    monitor = Monitor(source, views=[view], address="127.0.0.1:0")
    big = "b" * 400_000  # of which two are in each record; a broker takes a megabyte
    async with monitor, Running(source) as running, view, signed_in(monitor) as watched:
        page = watched.page
        page.on("dialog", lambda dialog: watched.complaints.append(dialog.message))
        await lab.add(HOSTILE, big, amount=7)
        for _ in range(3):
            await lab.add(f"other {HOSTILE}", deed=HOSTILE, partition=1)
        await lab.send(b'{"name": "n", "amount": NaN}', b"\xff\xfe<b>")
        await lab.flush()
        await running.until(lambda: view.statistics().keys >= 2, "the view has them")
        await view.fresh_within(1.0)

        await page.goto(f"{monitor.address}dead-letters")
        letter = page.locator(".letter", has_text="1@").first
        await expect(page.locator(".letter")).to_have_count(4)
        assert SHOWN in (await page.locator("main").text_content() or "")
        assert await page.locator("main img, main script").count() == 0
        await letter.locator("input").check()
        broken["is"] = False
        await page.get_by_role("button", name="Send the chosen ones again").click()
        await expect(page.locator("#run-replay-dead-letters-1 .state")).to_have_text("done")
        await page.goto(f"{monitor.address}dead-letters")
        await expect(page.locator(".letter")).to_have_count(3)
        await page.get_by_label("partition").fill("1")
        await page.get_by_role("button", name="Filter").click()
        await expect(page.locator(".letter")).to_have_count(2)
        await page.get_by_label("all on this page").check()
        await expect(page.locator(".letter input:checked")).to_have_count(2)
        await page.get_by_label("sure").check()
        await page.get_by_role("button", name="Drop the chosen ones").click()
        await expect(page.locator("#run-drop-dead-letters-1")).to_contain_text("dropped: 2; settled before: 0")
        await page.goto(f"{monitor.address}dead-letters")
        await expect(page.locator(".letter")).to_have_count(1)

        await page.goto(f"{monitor.address}views")
        await page.get_by_role("textbox", name="key").fill(big[:10])
        await page.get_by_role("button", name="Look up").click()
        await expect(page.locator("#value")).to_have_text("no such key")
        await page.get_by_role("textbox", name="key").fill("<b>\u202e")
        await page.get_by_role("button", name="Look up").click()
        assert "\\u202e" in (await page.locator("h3").text_content() or "")
        assert await page.locator("main b").count() == 0
        where = f"/api/v1/views/{source.config.changelog}?key={quote(HOSTILE)}"
        reply = await asyncio.to_thread(ask, monitor.port, where, monitor.link.partition("#")[2])
        assert msgspec.json.decode(reply.text) == {"found": True, "value": "7", "problem": ""}
        watched.check(monitor.port)


@pytest.mark.nightly
async def test_the_keyboard_is_enough(lab: Lab) -> None:
    await lab.create()
    source = picky(lab, {"is": True})
    monitor = with_action(Monitor(source, address="127.0.0.1:0"))
    async with monitor, Running(source), chromium() as watched:
        page, token = watched.page, monitor.link.partition("#")[2]
        await page.goto(monitor.address)
        await expect(page).to_have_url(f"{monitor.address}login")
        await page.keyboard.type(token)  # the field has the focus
        await page.keyboard.press("Enter")
        await expect(page).to_have_url(monitor.address)
        await page.keyboard.press("Tab")
        await expect(page.locator(":focus")).to_have_text("Skip to the content")
        for _ in PAGES[:7]:
            await page.keyboard.press("Tab")
        await expect(page.locator(":focus")).to_have_text("actions")
        await page.keyboard.press("Enter")
        await expect(page).to_have_url(f"{monitor.address}actions")
        for _ in range(10):
            await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.name") == "field-index"
        await page.keyboard.type("by name")
        await page.keyboard.press("Enter")
        run = page.locator("#run-rebuild-index-1 .state")
        await expect(run).to_have_text("running")
        # The focus stays where it is while the live part changes.
        await page.get_by_role("button", name="Cancel rebuild-index").focus()
        await expect(page.locator("#run-rebuild-index-1")).to_contain_text(re.compile(r"[1-9]\d* of 1,000"))
        await expect(page.locator(":focus")).to_have_text("Cancel rebuild-index")
        await page.keyboard.press("Enter")
        await expect(run).to_have_text("cancelled")
        watched.check(monitor.port)


@pytest.mark.nightly
@pytest.mark.timeout(400)
async def test_four_hundred_partitions(kafka_broker: BrokerAddress, topic_prefix: str) -> None:
    lab = Lab(kafka_broker.bootstrap_servers, topic_prefix, 400)
    await lab.create()
    source = picky(lab, {"is": True})
    monitor = Monitor(source, address="127.0.0.1:0")
    async with monitor, Running(source), signed_in(monitor) as watched:
        page = watched.page
        await page.goto(f"{monitor.address}source")
        await expect(page.locator("tbody[id^=p--]")).to_have_count(400)
        await lab.add("a", partition=399)
        await expect(page.locator("#p--399 td.position")).to_have_text(re.compile("[12]"))
        watched.check(monitor.port)


@pytest.mark.nightly
async def test_the_whole_group_is_on_each_page_and_a_silent_member_is_shown(
    kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path
) -> None:
    lab = Lab(kafka_broker.bootstrap_servers, topic_prefix, 4)
    await lab.create()
    (tmp_path / "shop.py").write_text(
        "from streams import EventSource, EventSourceConfig, Table\n"
        "from tests.vocabulary import register, count\n"
        f"config = EventSourceConfig(group_id={lab.group!r}, topic={lab.topic!r}, num_partitions=4)\n"
        "source = EventSource(config, Table.factory(key=str, value=int))\n"
        "register(source, count)\n"
    )
    token = "a-token-of-the-test-itself"
    tokens = private(tmp_path / "token", token)
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    servers = {"KES_BOOTSTRAP_SERVERS": kafka_broker.bootstrap_servers, "PYTHONPATH": path}
    options = ["--http", "127.0.0.1:0", "--http-tokens", str(tokens)]
    running = KesRun("shop:source", 2, tmp_path / "log", tmp_path, servers, options)
    try:
        await until(lambda: bool(running.said("monitor")), "it says its address", 60.0)
        address = running.said("monitor")[0]["address"]
        port = int(address.rstrip("/").rpartition(":")[2])

        def group() -> dict[str, object]:
            return msgspec.json.decode(ask(port, "/api/v1/group", token).text)  # type: ignore[no-any-return]

        def answers() -> dict[str, object]:
            members: list[dict[str, object]] = group()["members"]  # type: ignore[assignment]
            return {str(each["name"]): each["answers"] for each in members}

        await until(lambda: answers() == {"w-0": True, "w-1": True}, "both answer", 60.0)
        await lab.add(*"abcdef")
        elsewhere = Monitor(
            group=lab.group, address="127.0.0.1:0", token_file=str(tokens), bootstrap_servers=lab.bootstrap
        )
        async with elsewhere, chromium() as watched:
            page = watched.page
            await page.goto(f"{address}login#{token}")
            await expect(page).to_have_url(address)
            await expect(page.locator("#m-w-0")).to_contain_text("running")
            running.signal(0, signal.SIGSTOP)
            await expect(page.locator("#m-w-0")).to_contain_text("does not answer")
            await expect(page.locator("#m-w-1")).to_contain_text("running")
            running.signal(0, signal.SIGCONT)
            await expect(page.locator("#m-w-0")).to_contain_text("running")
            await page.goto(f"{address}source")
            await expect(page.locator("svg.topology")).to_be_visible()
            watched.check(port)
            text = (await asyncio.to_thread(ask, elsewhere.port, "/", token)).text
            assert "w-0" in text
            assert "w-1" in text
        command = Path(f"/proc/{running.process.pid}/cmdline")
        assert not command.exists() or token not in command.read_text()
        assert running.stop() == 0
        assert token not in (tmp_path / "log").read_text()
    finally:
        running.close()
