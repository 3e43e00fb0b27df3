"""Durable jobs on the pages: shown harmlessly, without their items, and acted on as they were chosen. What both tables
share is tried in ``test_web_parked.py``; the owners' answers are the test's own."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.core.parking import NEVER_MS
from streams.errors import NotOwned
from streams.settings.groups import QueryConfig
from tests.unit.private_kit import private
from tests.unit.test_web_parked import places, runs
from tests.unit.test_web_state import HOSTILE
from tests.unit.waiting import wait_until
from tests.unit.web_kit import QUERY, TOKENS, ask, served, source_of

from streams.queries.operating import JobClient  # isort: skip
from streams.runtime.queries.jobs import JobReply, JobRequest, ShownJob  # isort: skip
from streams.web import Monitor  # isort: skip

NAMES = [HOSTILE, "new\nline", "a b/c?d=%e-f", "é", "plain"]
asked: list[JobRequest] = []


def job(number: int, name: str) -> ShownJob:
    return ShownJob(
        name=name, jobs="deliver", id=f"kes-1-0-{number}", number=number, since_ms=1000 + number, due_ms=NEVER_MS,
        error=HOSTILE, is_parked=number == 0, is_running=number == 1, progress=(1, 2, HOSTILE), item=b"secret",
    )  # fmt: skip


@pytest.fixture
def monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    asked.clear()

    async def answer(self: JobClient, request: JobRequest, seconds: float) -> tuple[JobReply, float]:
        if request.partition == 3:
            raise NotOwned(f"orders[3]: no answer: {HOSTILE}")
        asked.append(request)
        found = [job(number, name) for number, name in enumerate(NAMES)] if request.partition == 0 else []
        count, done = len(found), tuple(name for name, _, _ in request.seen if name != "plain")
        found = [one for one in found if one.is_parked or not request.only_parked]
        common: dict[str, Any] = {"found": tuple(found), "done": done, "count": count, "parked": min(count, 1)}
        return JobReply(partition=request.partition, served_by="w-0", **common), 0.0

    monkeypatch.setattr(JobClient, "_ask", answer)
    secret = str(private(tmp_path / "secret", "the secret of this group"))
    source = source_of(queries=QueryConfig(secret_file=secret))
    with served(source, str(private(tmp_path / "tokens.toml", TOKENS))) as made:
        yield made


def test_jobs_are_shown_as_text_without_their_items(monitor: Monitor) -> None:
    page = ask(monitor.port, "/jobs").text
    assert not set("\x00\x1b\u202e") & set(page)
    assert "<script>alert" not in page
    for text in ("5 durable jobs, 1 of them waits for an operator", r"new\nline", "running: 1 of 2", "a b/c?d=%e-f"):
        assert text in page, text
    assert "1 of 4 partitions are not known: orders[3]: no answer" in page
    assert "secret" not in page + ask(monitor.port, "/api/v1/jobs").text
    assert places(ask(monitor.port, "/jobs", QUERY).text) == [], "it may not act"
    facts = json.loads(ask(monitor.port, "/api/v1/jobs?parked=true", QUERY).text)
    assert (facts["count"], facts["parked"], [each["state"] for each in facts["jobs"]]) == (5, 1, ["parked"])
    assert len(places(ask(monitor.port, "/jobs?parked=true").text)) == 1


@pytest.mark.parametrize("deed", ["retry", "cancel"])
def test_jobs_that_are_chosen_are_acted_on_as_they_were_shown(monitor: Monitor, deed: str) -> None:
    chosen = [html.unescape(place) for place in places(ask(monitor.port, "/jobs").text)]
    asked.clear()
    reply = ask(monitor.port, "/jobs/act", method="POST", body={"place": chosen, "deed": deed, "sure": "true"})
    assert (reply.status, reply.headers["location"]) == (303, "/actions")
    wait_until(lambda: runs(monitor)[0]["ended_ms"], "it is done", step=0.02)
    assert runs(monitor)[0]["result"] == f"{deed}: 4 of 5 jobs; other ones by now: 1"
    (request,) = asked
    assert (request.action, request.partition) == (deed, 0)
    assert request.seen == tuple((name, number, 1000 + number) for number, name in enumerate(NAMES))


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"deed": "retry"}, "Choose jobs first."),
        ({"deed": "cancel", "place": "0-1-2-n"}, "say that you are sure"),
        ({"deed": "drop", "place": "0-1-2-n", "sure": "true"}, "Invalid enum value"),
        ({"deed": "cancel", "place": "0-1-2-n", "sure": "true", "letters": "true"}, "as_letters"),
    ],
)
def test_what_is_not_clear_acts_on_no_job(monitor: Monitor, form: dict[str, Any], says: str) -> None:
    reply = ask(monitor.port, "/jobs/act", method="POST", body=form)
    assert (reply.status, says in reply.text, [each for each in asked if each.seen]) == (400, True, []), reply.text


@pytest.mark.parametrize("place", ["", "0-1-2", "0-1-2-", "-1-1-2-n", "0-x-2-n", "0-1-2-a b"])
def test_a_place_of_no_job_fails_the_run(monitor: Monitor, place: str) -> None:
    assert ask(monitor.port, "/jobs/act", method="POST", body={"place": place, "deed": "retry"}).status == 303
    wait_until(lambda: runs(monitor)[0]["ended_ms"], "it is done", step=0.02)
    assert ("name jobs by their places" in runs(monitor)[0]["result"], asked) == (True, [])
