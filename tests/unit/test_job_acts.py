"""Acts on durable jobs by the member that owns them: what is listed, each act once, over moves and lost answers; what
is refused by name. Their door is that of parked keys (``test_parked_acts.py``)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from streams import PARK
from streams.errors import ConfigError, MembershipLost, NotOwned
from streams.runtime.queries import jobs
from streams.runtime.queries.jobs import JobReply, JobRequest
from streams.runtime.queries.operating import answered
from streams.settings import QueryConfig
from streams.testing import TestDriver
from tests.unit.jobs_kit import LONG, Shop, order

pytestmark = pytest.mark.usefixtures("quiet")
OPERATE = QueryConfig(operate=True)


def ask(driver: TestDriver[Any], action: str = "list", member: int | None = None, **fields: Any) -> JobReply:
    """Put a request to the owner, or to this member."""
    number = driver.owner(0) if member is None else member
    assert number is not None
    engine = driver._world.members[number].source._run.present()
    reply: JobReply = driver._run(answered(engine, JobRequest(group="shop", partition=0, action=action, **fields)))
    if action != "list":
        driver.settle()
    assert msgspec.json.decode(msgspec.json.encode(reply), type=JobReply) == reply  # as it travels
    return reply


def seen(reply: JobReply) -> Any:
    return tuple(job.named for job in reply.found)


def test_jobs_are_listed_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting, running, parked, of a definition that is gone, in the order of their starts and in pages; with its item
    the one that is named."""
    monkeypatch.setattr(jobs, "PAGE", 2)
    shop = Shop(queries=OPERATE, retry=None, ordered=False)
    shop.takes_failures, shop.on_error = False, PARK
    shop.broken, shop.seconds = {1}, {2: 1000.0}
    with shop.driver() as driver:
        order(driver, 1)
        order(driver, 2, key="b" * 300, name="new\nline \x1b[31m", wait=False)
        order(driver, 3, key="c", delay=3600, wait=False)
        driver.advance(1)
        reply = ask(driver)
        assert ([job.state for job in reply.found], reply.more) == (["parked", "running"], True)
        found = [*reply.found, *ask(driver, after=reply.found[-1].place).found]
        assert ([job.state for job in found], reply.count, reply.parked) == (["parked", "running", "waiting"], 3, 1)
        assert [job.item for job in found] == [None] * 3
        assert (found[1].progress, found[1].key, found[1].key_bytes) == ((1, 2, "half"), b"b" * 256, 300)
        assert found[0].error == "ConnectionError: no answer to 1"
        for one in found:
            for named in ({"name": one.name}, {"id": one.id}):
                [shown] = ask(driver, **named).found
                assert (shown.id, shown.item_bytes, shown.item is not None) == (one.id, len(shown.item or b""), True)
        assert ask(driver, name=found[0].name, id=found[1].id).found == ()
        assert [job.id for job in ask(driver, only_parked=True).found] == [found[0].id]
        assert (len(ask(driver, jobs="deliver").found), ask(driver, jobs="other").found) == (2, ())
        shop.defines_jobs = False
        driver.leave()
        driver.restart()
        driver.settle()
        assert [job.state for job in ask(driver).found] == ["parked", "unknown"]


def test_an_act_is_done_once_by_whom_it_meets() -> None:
    """The request is put again to the owner, to the next one, and comes late to a later job of the name."""
    shop = Shop(queries=OPERATE, retry=LONG)
    shop.broken = {1, 2}
    with shop.driver(members=2) as driver:
        order(driver, 1, name="n")
        there = seen(ask(driver))
        assert (ask(driver, "retry", seen=there).done, len(shop.calls)) == (("n",), 2)
        assert (ask(driver, "retry", seen=there).done, len(shop.calls)) == ((), 2)
        driver.leave(driver.owner(0))
        driver.settle()
        assert (ask(driver, "retry", seen=there).done, len(shop.calls)) == ((), 2)
        now = seen(ask(driver))
        assert ask(driver, "cancel", seen=now).done == ("n",)
        assert shop.failed == [(1, "JobCancelled: an operator has cancelled the job")]
        order(driver, 2, name="n")
        assert [ask(driver, action, seen=now).done for action in ("retry", "cancel")] == [(), ()]
        assert (len(ask(driver).found), len(shop.failed)) == (1, 1)
        driver.check()


@pytest.mark.parametrize("trouble", ["lost reply", "lost request", "abort", "crash", "evict"])
def test_a_cancel_whose_answer_is_lost_is_done_once(trouble: str) -> None:
    shop = Shop(queries=OPERATE)
    shop.seconds = {1: 1e6}
    with shop.driver(members=2) as driver:
        order(driver, 1, wait=False)
        driver.advance(1)
        there, owner = seen(ask(driver)), driver.owner(0)
        assert owner is not None
        {
            "lost reply": lambda: driver.lose_reply("commit", owner),
            "lost request": lambda: driver.lose_request("commit", owner),
            "abort": lambda: driver.abort(owner),
            "crash": lambda: driver.at("commit.before", driver.crash),
            "evict": lambda: driver.at("commit.before", driver.evict),
        }[trouble]()
        engine = driver._world.members[owner].source._run.present()
        request = JobRequest(group="shop", partition=0, action="cancel", seen=there)

        async def put() -> Any:
            async with asyncio.timeout(5):
                return await answered(engine, request)

        with suppress(MembershipLost, NotOwned, TimeoutError):
            driver._run(put())
        driver.advance(30)
        driver.settle()
        ask(driver, "cancel", seen=there)
        assert (driver.jobs(), driver.store(0).get("a")) == ([], (-1,))
        driver.check()


def test_jobs_without_a_definition_can_be_cancelled() -> None:
    shop = Shop(queries=OPERATE)
    with shop.driver() as driver:
        order(driver, 1, 2, delay=3600)
        shop.defines_jobs = False
        driver.leave()
        driver.restart()
        driver.settle()
        there = seen(ask(driver))
        assert len(ask(driver, "cancel", seen=there[:1]).done) == 1
        assert [job.named for job in ask(driver).found] == [*there[1:]]


def test_only_an_owner_with_the_right_acts() -> None:
    shop = Shop()
    with shop.driver(members=2) as driver:
        order(driver, 1, delay=3600)
        there, owner = seen(ask(driver)), driver.owner(0)
        with pytest.raises(ConfigError, match=r"QueryConfig\.operate is not set"):
            ask(driver, "cancel", seen=there)
        assert owner is not None
        with pytest.raises(NotOwned):
            ask(driver, "cancel", member=1 - owner, seen=there)
        assert len(driver.jobs()) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": "other"}, "is for the group 'other'"),
        ({"partition": 1}, "partition 1"),
        ({"action": "drop"}, "there are list, retry, cancel"),
        ({"action": "cancel"}, "an act names the jobs"),
        ({"action": "cancel", "seen": (("n", 0, 1),) * 2}, "each job once"),
        ({"action": "cancel", "seen": (("n" * 501, 0, 1),)}, "more than 500 bytes"),
        ({"name": "n" * 501}, "more than 500 bytes"),
        ({"after": "1"}, "has 20 digits"),
    ],
)
def test_requests_that_cannot_be_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobRequest(**{"group": "shop", "partition": 0} | fields).checked("shop", 1)
