"""The way of a request for visits into its topic, ``kes visit``, and what the members publish."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from streams import EventSource, EventSourceConfig, Table
from streams.cli import visit
from streams.cli.main import main
from streams.core.visits import VisitRequest
from streams.errors import BrokerUnavailable, RecordRefused
from streams.kafka.questions.group_view import GroupView
from streams.looks.group_live import LiveGroup, LiveMember
from streams.observability.catalogue import VISIT_KEYS, VISIT_RUNNING, figures
from streams.records import Acknowledgement, Record
from streams.runtime import visit_requests
from streams.runtime.status import NOTE_LETTERS, MemberStatus, note_of, status_of
from streams.statistics import JobStatistics, ParkedStatistics, VisitRunStatistics
from tests.unit.visits_kit import VISITS, build, driven, fill

REQUEST = VisitRequest("look", "run")


class Producer:
    """Takes each record at the second try, and reports these errors."""

    def __init__(self, *errors: Exception | None, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self.taken: list[Record] = []
        self._errors, self._tries = list(errors), 0

    def produce(self, record: Record, token: object) -> bool:
        self._tries += 1
        if self._tries % 2:
            return False
        self.taken.append(record)
        return True

    def poll(self, timeout_seconds: float) -> list[Acknowledgement]:
        reports = [Acknowledgement(0, 0, 0, error) for error in self._errors[: len(self.taken)]]
        del self._errors[: len(reports)]
        return reports

    def close(self) -> None:
        pass


def test_each_partition_gets_one_record() -> None:
    producer = Producer(None, None)
    reports = visit_requests._sent(producer, build().config, REQUEST)
    assert len(reports) == 2
    assert [(one.topic, one.partition, one.key) for one in producer.taken] == [(VISITS, 0, None), (VISITS, 1, None)]


def test_a_producer_that_breaks_says_how_far_it_came() -> None:
    with pytest.raises(BrokerUnavailable, match=r"shop\.orders\.visits: 1 of 2 partitions have it"):
        visit_requests._sent(Producer(None, is_broken=True), build().config, REQUEST)


def test_a_refused_request_is_raised_with_what_to_do() -> None:
    with driven(build()) as driver:
        driver._world.broker.refuses = lambda topic, entry: topic == VISITS
        with pytest.raises(RecordRefused) as refused:
            driver._run(driver._world.members[0].source.start_visit("look"))
        assert "with the same run id" in refused.value.__notes__[0]


# -- what is published -------------------------------------------------------------------------------------------------


def status(*runs: VisitRunStatistics) -> MemberStatus:
    return MemberStatus(1, "m", 1, 2, (), (), (), visits=runs)


def test_members_publish_runs() -> None:
    with driven(build()) as driver:
        fill(driver, 5)
        driver.start_visit("look")
        engine = driver._world.members[0].engine
        assert engine is not None
        (found,) = engine.status._visits()
        assert found == VisitRunStatistics("look", "run", ended=2, keys=5)
        samples = {(family.name, labels): value for family, value, labels in figures(driver.statistics())}
        assert samples[VISIT_RUNNING.name, ("0", "look")] == 0
        assert samples[VISIT_KEYS.name, ("0", "look")] == 0
    with driven(build(visits=False)) as driver:
        engine = driver._world.members[0].engine
        assert engine is not None
        assert engine.status._visits() == ()


def test_a_note_has_the_last_runs_that_fit() -> None:
    runs = [VisitRunStatistics("look", f"run-{number}", ended=1) for number in range(200)]
    note = note_of(status(*runs))
    assert len(note) <= NOTE_LETTERS
    read = status_of(note).visits
    assert read == tuple(runs[-len(read) :])
    assert len(read) > 10
    older = json.loads(note)
    del older["visits"]
    assert status_of(json.dumps(older)).visits == (), "of a release before"


def test_a_note_has_the_oldest_parked_keys_that_fit_and_counts_the_rest() -> None:
    parked = tuple(ParkedStatistics(number, 1, 2, 1_767_225_630_123 + number) for number in range(1_000))
    note = note_of(msgspec.structs.replace(status(), parked=parked))
    assert len(note) <= NOTE_LETTERS
    read = status_of(note)
    assert read.parked == parked[: len(read.parked)]
    assert (len(read.parked) > 50, len(read.parked) + read.parked_more) == (True, 1_000)
    jobs = tuple(JobStatistics(number, 1, 1_767_225_630_123 + number) for number in range(1_000))
    read = status_of(note_of(msgspec.structs.replace(status(), jobs=jobs)))
    assert (read.jobs, len(read.jobs) + read.jobs_more) == (jobs[: len(read.jobs)], 1_000)


# -- the command -------------------------------------------------------------------------------------------------------

source = EventSource(
    EventSourceConfig(group_id="g", topic="t", num_partitions=4, visits=True),
    Table.factory(key=str, value=int, ordered=True),
)
source.register_visit("look", lambda ctx, key, value: None)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[VisitRequest]:
    """What the command requests of a cluster that takes everything; no member runs."""
    requests: list[VisitRequest] = []

    async def send(config: Any, connections: Any, request: VisitRequest) -> None:
        assert config.bootstrap_servers == "some:9092"
        requests.append(request)

    monkeypatch.setattr("streams.runtime.visit_requests.send_request", send)
    monkeypatch.setattr(visit, "await_listener", lambda servers, seconds: None)
    monkeypatch.setattr(LiveGroup, "read", lambda self, seconds: (GroupView(group="g", kind="classic"), {}, ()))
    return requests


def kes(*arguments: str, name: str = "look") -> int:
    where = ["--bootstrap-servers", "some:9092"]
    return main(["visit", "tests.unit.test_visit_requests:source", name, *where, *arguments])


def test_the_command_requests(sent: list[VisitRequest], capsys: pytest.CaptureFixture[str]) -> None:
    assert [kes("--run", "r", "--json"), kes("--cancel"), kes("--run", "r", "--cancel"), kes()] == [0, 0, 0, 0]
    assert sent[:3] == [
        VisitRequest("look", "r"),
        VisitRequest("look", "", "cancel"),
        VisitRequest("look", "r", "cancel"),
    ]
    assert len(sent[3].run) == 32
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[0]) == {"visit": "look", "run": "r"}
    assert sent[3].run in out, "it is printed"


def test_the_command_refuses(sent: list[VisitRequest], capsys: pytest.CaptureFixture[str]) -> None:
    assert kes("--status", "--cancel") == 2
    for arguments in ((), ("--status",), ("--cancel",)):
        assert kes(*arguments, name="nothing") == 1
        assert "no visit 'nothing'; it has look" in capsys.readouterr().err
    assert kes("--run", "ü") == 1
    assert kes("--status") == 1
    assert "no member of the group g publishes its status: none is running" in " ".join(capsys.readouterr().err.split())
    assert sent == []


def test_the_command_adds_up_what_members_publish(
    sent: list[VisitRequest], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = status(VisitRunStatistics("look", "r", running=1, ended=1, keys=1_000), VisitRunStatistics("other", "r"))
    two = status(VisitRunStatistics("look", "r", ended=1, keys=500), VisitRunStatistics("look", "before", ended=1))
    live = {name: LiveMember(found, {}, 0.0) for name, found in (("a", one), ("b", two))}
    monkeypatch.setattr(LiveGroup, "read", lambda self, seconds: (GroupView(group="g", kind="classic"), live, ()))
    assert kes("--status", "--run", "r", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["running"], found["ended"], found["keys"]) == (1, 2, 1_500)
    assert kes("--status") == 0
    table = capsys.readouterr().out
    assert "1,500" in table
    assert "before" in table
    assert kes("--status", "--run", "gone") == 0
    assert "no run of look is known" in capsys.readouterr().out
