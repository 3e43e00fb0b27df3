"""The code of the README, the guides and the reference runs as it stands there, and what they say is so."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import re
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples import bank
from examples.bank import Deposited
from examples.page_views import source
from streams import EventContext, EventSource, EventSourceConfig, event_type
from streams.records import IncomingRecord
from streams.runtime.changelog import decode_timer, timer_key
from streams.runtime.partition.batch_handlers import BATCH
from streams.runtime.partition.hot_path import LONGEST_SLICE_SECONDS, SLICE
from streams.testing import FAULTS, POINTS, TestDriver
from streams.testing import plugin as plugin_module

DOCS = Path(__file__).resolve().parents[2] / "docs"
Program = Callable[[str], Any]


def blocks(page: str, language: str = "python") -> list[str]:
    text = (DOCS / f"{page}.md").read_text("utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found
    return found


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """All blocks of a page as one module."""

    def run(page: str) -> Any:
        module = types.ModuleType("program_of_" + page.replace("/", "_").replace("-", "_"))
        monkeypatch.setitem(sys.modules, module.__name__, module)  # events find their annotations there
        exec(compile("\n".join(blocks(page)), f"{page}.md", "exec"), vars(module))
        return module

    return run


@pytest.mark.parametrize(
    ("page", "test"),
    [
        ("reference/events", None),
        ("guides/foreign-topics", None),
        ("guides/cloudevents", None),
        ("guides/schema-registry", "test_a_deposit_is_a_balance"),
        ("reference/stores", None),
        ("guides/state-on-disk", None),
        ("guides/beginnings", "test_it_begins_behind_the_first_deposit"),
        ("guides/rebuilding", None),
        ("guides/structures", "test_a_minute_is_reported_when_it_is_over"),
        ("coming-from-goka", "test_a_message_of_goka_meets_the_row_of_its_group_table"),
        ("guides/joins", "test_an_order_has_the_address_of_its_customer"),
        ("guides/loop", "test_each_order_reserves_once"),
        ("guides/timers", "test_a_visit_ends_when_nothing_was_viewed_for_half_an_hour"),
        ("guides/batch-handlers", "test_a_page_is_counted_once_for_each_view"),
        ("guides/async-jobs", "test_a_crash_loses_nothing"),
    ],
)
def test_the_examples_of_a_page_run_and_so_does_its_test(program: Program, page: str, test: str | None) -> None:
    made = program(page)
    if test is not None:
        getattr(made, test)()


def test_the_application_that_is_compared(program: Program) -> None:
    page = program("coming-from")
    with TestDriver(page.source) as driver:
        for cents in (5, 7):
            driver.send(page.Deposited("ann", cents), key="ann")
        assert driver.outputs("bank-balances", page.Balance) == [page.Balance("ann", 5), page.Balance("ann", 12)]


# -- asynchronous work -------------------------------------------------------------------------------------------------


def test_jobs_in_their_short_form(program: Program) -> None:
    guide = program("guides/async-jobs")
    with TestDriver(guide.source) as driver:
        for number in range(40):
            driver.send(guide.OrderPlaced("ann", 100 * number), key="ann", wait=False)
        driver.settle()
        rated = driver.outputs("rated-orders", guide.OrderRated)
    assert [order.risk for order in rated] == list(range(40))


def test_jobs_finalizers_and_dead_letters(program: Program) -> None:
    guide = program("guides/async-jobs")
    with TestDriver(guide.source) as driver:
        for cents in (5, 0, 7):
            driver.send(guide.PaymentRequested("ann", cents), key="ann")
        assert len(driver.outputs("payments", guide.PaymentMade)) == 2
        assert len(driver.dead_letters()) == 1
        driver.send(guide.RefundRequested("ann", 5), key="ann")
        *_, last = driver.outputs("payments", guide.PaymentMade, guide.PaymentFailed)
        assert last == guide.PaymentFailed("ann", "the bank is closed")


def test_chains_and_work_that_depends_on_the_store(program: Program) -> None:
    guide = program("guides/async-jobs")
    with TestDriver(guide.source) as driver:
        driver.send(guide.ImageUploaded("a.png"), key="a.png")
        for _ in range(2):
            driver.send(guide.BalanceAsked("bob"), key="bob")
        assert len(driver.outputs("images", guide.ImageMeasured)) == 1
        assert len(driver.outputs("payments", guide.PaymentMade)) == 1


def test_what_comes_behind_a_transfer_that_is_tried_later_waits_for_it(program: Program) -> None:
    """Over its attempts, a crash, and an hour."""
    guide, down, asked = program("guides/retries-and-timeouts"), {"first"}, list[str]()

    async def ask(transfer: Any) -> int:
        asked.append(transfer.transfer)
        if transfer.transfer in down:
            raise ConnectionError("down")
        return 7

    guide.ask_the_service = ask
    with TestDriver(guide.source) as driver:

        def told() -> list[str]:
            return [event.transfer for event in driver.outputs("scored", guide.Scored)]

        for name, account in (("first", "ada"), ("second", "ada"), ("other", "bob")):
            driver.send(guide.Transfer(name, account), key=account, wait=False)
        driver.advance(20)
        assert (told(), asked.count("first")) == (["other"], 4)
        driver.crash()
        driver.restart()
        driver.send(guide.Transfer("third", "ada"), key="ada", wait=False)
        driver.advance(20)
        assert told() == ["other"]
        down.clear()
        driver.advance(3600)
        assert told() == ["other", "first", "second", "third"]
        driver.check()


def test_batching(program: Program) -> None:
    guide = program("guides/batching")
    orders = [guide.Order(f"o{number}", "c", ["tea", "cup"] * (number % 3)) for number in range(8)]
    with TestDriver(guide.source) as driver:
        for order in orders:
            driver.send(order, partition=0, wait=False)
        driver.settle()
        assert sorted(driver.outputs("priced", guide.Priced), key=lambda priced: str(priced.id)) == [
            guide.Priced(order.id, 625 * len(order.products)) for order in orders if order.products
        ]
        assert sum(guide.calls) == sum(len(order.products) for order in orders)
        assert len(guide.calls) < 5, "many events in one call"
        driver.send(guide.Order("bad", "c", ["tea", "spoon"]), partition=0)
        (letter,) = driver.dead_letters()
        assert b"no price for spoon" in (value for _, value in letter.headers or ())
        driver.send(guide.Quoted("pot"), partition=0)
        assert driver.store(0).get("pot") == 2400
        driver.send(guide.Shipped("s1", ["a", "b"]), partition=1)
        assert driver.store(1).get("told-shipments-b") == 0
        assert len(driver.outputs("shipments-a")) == 1


# -- timers, batch handlers --------------------------------------------------------------------------------------------


def test_the_record_of_a_timer() -> None:
    (block,) = blocks("guides/timers", "json")
    name, timer = decode_timer(IncomingRecord("c", 0, 0, timer_key("n"), block.encode(), None))
    assert timer is not None
    assert (name, json.loads(timer.value), timer.key) == ("n", {"order": "o7"}, b"o7")


def test_the_sizes_of_lists() -> None:
    text = (DOCS / "guides/batch-handlers.md").read_text("utf-8")
    assert f"at most {SLICE}**" in text
    assert f"longer than {LONGEST_SLICE_SECONDS * 1000:g} ms" in text


def test_a_batch_handler_is_one_in_other_processes_too() -> None:
    """As a replay on Spark sends it there."""
    route = pickle.loads(pickle.dumps(source._declared.router.routes[b"Viewed"]))
    assert (route.kind, route.plain, route.name) == (BATCH, False, "Viewed")


# -- testing -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, quiet: None) -> list[types.ModuleType]:
    """The files of the page; a block without a name of a file goes on with the one before."""
    found: list[types.ModuleType] = []
    for block in blocks("guides/testing"):
        named = re.match(r"# (\w+)\.py\n", block)
        if named is not None:
            found.append(types.ModuleType(named[1]))
            monkeypatch.setitem(sys.modules, named[1], found[-1])
        exec(compile(block, "testing.md", "exec"), vars(found[-1]))
    return found


@pytest.mark.timeout(300)
def test_the_examples_of_the_guide_about_testing_run(
    modules: list[types.ModuleType], request: pytest.FixtureRequest
) -> None:
    ran = []
    for module in modules:
        for name, test in vars(module).items():
            if name.startswith("test_") and callable(test):
                result = test(**{given: request.getfixturevalue(given) for given in inspect.signature(test).parameters})
                if inspect.iscoroutine(result):
                    asyncio.run(result)
                ran.append(name)
    assert len(ran) >= 7


def test_the_tables_name_every_point_fault_and_fixture() -> None:
    guide = (DOCS / "guides/testing.md").read_text("utf-8")
    for point in POINTS:
        assert f"`{point}`" in guide
    methods = {name for name, _ in inspect.getmembers(TestDriver, inspect.isfunction) if not name.startswith("_")}
    fixtures = {name for name in vars(plugin_module) if name.startswith("kes_")}
    told_elsewhere = {"close", "start", "statistics", "stores"}
    for name in {*methods, *fixtures, *FAULTS} - told_elsewhere:
        assert re.search(rf"\b{name}\b", guide), name


# -- the README --------------------------------------------------------------------------------------------------------


@event_type("ReadmeAssessment")
class Assessment(msgspec.Struct, frozen=True):
    account: str
    risk: int


@event_type("ReadmeReview")
class Review(msgspec.Struct, frozen=True):
    account: str


def block_with(text: str) -> str:
    """The one block of the README that has this text."""
    (found,) = (block for block in blocks("../README") if text in block)
    return found


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
