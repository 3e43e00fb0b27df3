"""``kes jobs`` on a real broker: in the place of stopped members, and at the owner, beside what runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streams import AsyncJobScheduler, EventContext, EventSource, Retry
from streams.runtime import status
from streams.settings import QueryConfig, SchedulerConfig
from tests.broker.engine_kit import Lab, Running
from tests.unit.private_kit import private
from tests.unit.waiting import PATIENCE
from tests.unit.web_kit import ask
from tests.vocabulary import Added, Total, Totals, register

from streams.queries import QueryServer  # isort: skip
from streams.web import Monitor  # isort: skip

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(180)]

PARTITIONS = 2
Kes = Callable[..., tuple[int, Any, str]]
NAME = "of a\n"


class Hooks:
    """A source with a durable job per event, named after it. A call of a name in ``failing`` fails, one in ``hanging``
    does not end. Without ``defines`` the source has no such jobs any more."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.failing = {"a", "b", "c"}
        self.hanging: set[str] = set()
        self.called: list[str] = []
        self.defines = True

    def source(self, **settings: Any) -> EventSource[Totals]:
        source = self._lab.source(instance_id="hooks", **settings)

        async def deliver(name: str) -> int:
            self.called.append(name)
            if name in self.hanging:
                await asyncio.Event().wait()
            if name in self.failing:
                raise ConnectionError(f"no answer to {name}")
            return 1

        def told(ctx: EventContext[Totals], name: str, amount: int) -> None:
            ctx.forward(self._lab.output, Total(name, amount), key=name)

        def failed(ctx: EventContext[Totals], name: str, error: Exception) -> None:
            ctx.forward(self._lab.output, Total(f"{name} {type(error).__name__}", 0), key=name)

        jobs: Any = None
        if self.defines:
            hourly = Retry(attempts=9, backoff_seconds=3600, max_backoff_seconds=3600)
            config = SchedulerConfig(concurrency=8, retry=hourly)
            jobs = AsyncJobScheduler(source, deliver, told, on_failure=failed, config=config)

        def start(ctx: EventContext[Totals], event: Added) -> None:
            ctx.start_job(jobs, event.name, name=f"of {event.name}\n")

        register(source, start)
        return source


async def test_jobs_are_listed_retried_and_cancelled(
    lab: Lab, kes: Kes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "OLD_JOB_SECONDS", 0)
    await lab.create()
    hooks = Hooks(lab)
    source = hooks.source()

    async def jobs(*words: str) -> tuple[int, Any, str]:
        command, *rest = words
        return await asyncio.to_thread(kes, source, "jobs", command, *rest, behind=2)

    async def states() -> dict[str, str]:
        return {row["name"]: row["state"] for row in (await jobs("list"))[1]["jobs"]}

    await lab.add("a", "b", "c", "d")
    async with Running(source) as running:
        await running.until(lambda: source.statistics().partitions[0].jobs == 3, "d is delivered, the others failed")
        await running.until(lambda: not source.statistics().unsettled_transactions, "this is committed")
        assert await states() == dict.fromkeys(("of a\n", "of b\n", "of c\n"), "waiting")
        code, _, err = await jobs("cancel", NAME, "--yes")
        assert (code, "members that run" in " ".join(err.split())) == (1, True), err

    # All are stopped: each act is a transaction, which the next start finds.
    code, shown, err = await jobs("show", NAME)
    assert (code, shown and (shown["item"], shown["attempts"], shown["error"])) == (
        0,
        ("a", 1, "ConnectionError: no answer to a"),
    ), err
    code, answer, err = await jobs("cancel", NAME, "--yes")
    assert (code, answer and [row["id"] for row in answer["jobs"]]) == (0, [shown["id"]]), err
    assert (await states())[NAME] == "cancelled"
    code, _, err = await jobs("cancel", NAME, "--yes")
    assert (code, "it is cancelled" in " ".join(err.split())) == (1, True), err
    hooks.failing, before = set(), len(hooks.called)
    assert (await jobs("retry", "of b\n", "--yes"))[0] == 0
    async with Running(source) as running:
        await lab.until_outputs(3)
        assert hooks.called[before:] == ["b"]
    first = [("a JobCancelled", 0), ("b", 1), ("d", 1)]
    assert sorted(await lab.totals()) == first

    # The owner acts, also on what runs, and on what it does not define any more.
    queries = QueryConfig(secret_file=str(private(tmp_path / "secret", "the secret of this group")), operate=True)
    hooks.hanging = {"e"}
    source = hooks.source(queries=queries)
    server = QueryServer(source, "127.0.0.1:0")
    await lab.add("e")
    async with Running(source) as running:
        await running.until(lambda: "e" in hooks.called, "the job of e runs")
        assert await states() == {"of c\n": "waiting", "of e\n": "running"}
        code, answer, err = await jobs("cancel", "of e\n", "--yes")
        assert (code, answer and answer["jobs"][0]["state"]) == (0, "running"), err
        assert (await jobs("retry", "--all", "--yes"))[0] == 0
        await lab.until_outputs(5)
        assert sorted(await lab.totals()) == sorted([*first, ("c", 1), ("e JobCancelled", 0)])
        assert (await jobs("list"))[:2] == (0, {"jobs": []})
        code, _, err = await jobs("retry", "of c\n", "--yes")
        assert (code, "no such job" in err) == (1, True), err
        hooks.failing = {"f"}
        await lab.add("f")
        await running.until(lambda: hooks.called[-1] == "f", "the job of f fails")
    server.close()
    hooks.defines = False
    source = hooks.source(queries=queries)
    server = QueryServer(source, "127.0.0.1:0")
    async with Running(source):
        assert await states() == {"of f\n": "unknown"}
        async with asyncio.timeout(PATIENCE):  # members report once a second
            while not (told := (await asyncio.to_thread(kes, source, "lag", behind=1))[1]["jobs"]):
                pass
        assert [(row["partition"], row["parked"]) for row in told] == [(0, 0)]
        _, found, _ = await asyncio.to_thread(kes, source, "doctor", behind=1)
        assert ("jobs", "ok") in [(each["check"], each["state"]) for each in found["findings"]]
        async with Monitor(source, address="127.0.0.1:0") as monitor:  # its pages do the same

            def web(path: str, **more: Any) -> Any:
                return json.loads(ask(monitor.port, path, monitor.link.partition("#")[2], **more).text)

            [shown] = (await asyncio.to_thread(web, "/api/v1/jobs"))["jobs"]
            body = json.dumps({"action": "retry", "places": [shown["place"]]})
            await asyncio.to_thread(web, "/api/v1/actions/act-on-jobs/start", method="POST", body=body)
            async with asyncio.timeout(PATIENCE):
                while (now := (await asyncio.to_thread(web, "/api/v1/jobs"))["jobs"][0])["attempts"]:
                    pass
            assert (now["id"], now["state"], now["since_ms"] > shown["since_ms"]) == (shown["id"], "unknown", True)
        assert (await jobs("cancel", "--all", "--yes"))[0] == 0
        assert (await jobs("list"))[:2] == (0, {"jobs": []})
    server.close()
    assert len(await lab.totals()) == 5
    await lab.check_settled(lab.topic, lab.output, lab.changelog)
