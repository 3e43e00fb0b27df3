"""The command line in this process: what it answers, what it complains of, and its exit code; and a cluster for it."""

from __future__ import annotations

import json
import os
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol

import pytest

from streams import EventSource
from streams.cli import cluster, main, topics
from streams.kafka.questions.admin import TopicDescription, Watermarks
from streams.kafka.questions.group_view import GroupView, MemberView
from streams.kafka.questions.lags import PartitionLag
from streams.model.topics import TopicSpec
from tests.vocabulary import config_of


class Answer(NamedTuple):
    out: str
    err: str

    @property
    def words(self) -> str:
        """The complaint, without its frame and line breaks."""
        return " ".join(self.err.replace("│", " ").split())

    @property
    def data(self) -> Any:
        """The answer to ``--json``."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        """The answer without frames and empty lines: the words of each line."""
        found = [" ".join(re.sub("[─-╿]", " ", line).split()) for line in self.out.splitlines()]
        return [line for line in found if line]


class Kes(Protocol):
    def __call__(self, *arguments: str, code: int = 0) -> Answer:
        """The answer to ``kes <arguments>``, which ends with this code and never with a stack trace."""


def kes_with(capsys: pytest.CaptureFixture[str]) -> Kes:
    def kes(*arguments: str, code: int = 0) -> Answer:
        capsys.readouterr()
        ended = main.main([*arguments])
        answer = Answer(*capsys.readouterr())
        assert ended == code, answer
        assert "KES_DEBUG" in os.environ or "Traceback" not in answer.err
        return answer

    return kes


def preset(kes: Kes, *first: str) -> Kes:
    """The same for a command whose first words are always these."""
    return lambda *arguments, code=0: kes(*first, *arguments, code=code)


class FakeCluster:
    """Topics in a dictionary, and who is in the group; ``lags`` are the answers to ``lag``, one after the other."""

    def __init__(self) -> None:
        self.there: dict[str, TopicSpec] = {}
        self.lags: list[list[PartitionLag] | Exception] = []
        self.asked: list[tuple[object, ...]] = []
        self.settings: list[Any] = []
        self.grown: list[str] = []
        self.members: tuple[MemberView, ...] = ()

    def create(self, specs: list[TopicSpec], timeout_seconds: float) -> list[str]:
        self.asked.append(("create", timeout_seconds))
        new = [spec for spec in specs if spec.name not in self.there]
        self.there |= {spec.name: spec for spec in new}
        return [spec.name for spec in new]

    def describe(self, names: list[str], timeout_seconds: float) -> dict[str, TopicDescription | None]:
        self.asked.append(("describe", timeout_seconds))
        return {name: self._described(name) for name in names}

    def _described(self, name: str) -> TopicDescription | None:
        if name not in self.there:
            return None
        fields = ("name", "partitions", "replication_factor", "configs")
        return TopicDescription(topic_id="id", **{field: getattr(self.there[name], field) for field in fields})

    @property
    def tails(self) -> Any:
        return SimpleNamespace(without_markers=lambda _, lags: [*lags], with_ages=lambda _, lags, now_ms: [*lags])

    def lag(self, group: str, topic: str, timeout_seconds: float) -> list[PartitionLag]:
        self.asked.append(("lag", group, topic, timeout_seconds))
        answer = self.lags.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def identity(self, name: str, timeout_seconds: float) -> tuple[str, int] | None:
        return ("id", self.there[name].partitions) if name in self.there else None

    def watermarks(self, topic: str, partitions: list[int], timeout_seconds: float) -> dict[int, Watermarks]:
        return {number: Watermarks(0, 0, 100) for number in partitions}

    def grow(self, name: str, partitions: int, timeout_seconds: float) -> None:
        self.there[name] = spec(name, partitions)
        self.grown.append(name)

    def describe_group(self, group: str, timeout_seconds: float) -> GroupView:
        return GroupView(group=group, kind="classic", members=self.members)

    def close(self) -> None:
        self.asked.append(("close",))


def spec(name: str, partitions: int = 4, **changes: Any) -> TopicSpec:
    configs = {"min.insync.replicas": "2"} | ({"cleanup.policy": "compact"} if name.endswith("changelog") else {})
    return TopicSpec(**{"name": name, "partitions": partitions, "replication_factor": 3, "configs": configs, **changes})


def source_of(group: str = "demo", **settings: Any) -> EventSource[Any]:
    known: dict[str, Any] = {"topic": "flights", "num_partitions": 4, "replication_factor": 3, "min_insync_replicas": 2}
    return EventSource(config_of(group_id=group, **known | settings))


def forget_modules(monkeypatch: pytest.MonkeyPatch, *beginnings: str) -> None:
    """Have the modules with these names imported anew, and the ones of now back after the test: as attributes of their
    packages, too, by which a later test would find the new ones."""
    for name in [name for name in sys.modules if name.startswith(beginnings)]:
        package, _, last = name.rpartition(".")
        if sys.modules[name] is getattr(sys.modules[package], last, None):
            monkeypatch.setattr(sys.modules[package], last, sys.modules[name])
    for name in [name for name in sys.modules if name.startswith(beginnings)]:
        monkeypatch.delitem(sys.modules, name)


class SourceOfAnotherKind:
    def run(self) -> None: ...


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """The cluster that commands meet, and a module ``fleet`` with an event source."""
    fake = FakeCluster()

    def connect(settings: Any) -> FakeCluster:
        fake.asked.append(("connect", settings.bootstrap_servers))
        fake.settings.append(settings)
        return fake

    module = ModuleType("fleet")
    vars(module).update(source=source_of(), make=source_of, other=SourceOfAnotherKind())
    monkeypatch.setitem(sys.modules, "fleet", module)
    monkeypatch.setattr(cluster, "TopicAdmin", connect)
    monkeypatch.setattr(cluster, "await_listener", lambda servers, seconds: None)
    monkeypatch.setattr(topics, "GroupQuestions", lambda servers, security: fake)
    monkeypatch.setenv("COLUMNS", "120")
    return fake
