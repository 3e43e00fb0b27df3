"""Which broker the session fixture takes."""

from __future__ import annotations

import importlib
import subprocess
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from streams.errors import ConfigError
from streams.testing import fixtures
from streams.testing.fixtures import GivenBroker, docker_answers, session_broker


class FakeContainer:
    """What testcontainers offers, as far as it is used."""

    running = 0

    def __init__(self) -> None:
        self.env: dict[str, str] = {}

    def with_kraft(self) -> FakeContainer:
        return self

    def with_env(self, name: str, value: str) -> FakeContainer:
        self.env[name] = value
        return self

    def __enter__(self) -> FakeContainer:
        FakeContainer.running += 1
        return self

    def __exit__(self, *_: object) -> None:
        FakeContainer.running -= 1

    def get_bootstrap_server(self) -> str:
        assert self.env["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
        return "docker:1"


@pytest.fixture(autouse=True)
def nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.delenv("KES_TEST_BROKER", raising=False)
    embedded = nullcontext(SimpleNamespace(bootstrap_servers="embedded:1"))
    monkeypatch.setattr(fixtures, "KafkaBroker", lambda: embedded)
    module = SimpleNamespace(KafkaContainer=FakeContainer)
    monkeypatch.setattr(importlib, "import_module", lambda _: module)


@pytest.mark.parametrize(
    ("kind", "docker", "given", "servers"),
    [
        ("", False, "", "embedded:1"),
        ("", True, "", "docker:1"),
        ("", True, "given:1,given:2", "given:1,given:2"),
        ("embedded", True, "given:1", "embedded:1"),
        ("docker", True, "given:1", "docker:1"),
        ("environment", True, "given:1", "given:1"),
        ("docker", False, "", "no Docker engine"),
        ("environment", False, "", "KES_BOOTSTRAP_SERVERS"),
        ("cloud", False, "", "one of"),
    ],
)
def test_which_is_taken(monkeypatch: pytest.MonkeyPatch, kind: str, docker: bool, given: str, servers: str) -> None:
    monkeypatch.setattr(fixtures, "docker_answers", lambda: docker)
    for name, value in (("KES_TEST_BROKER", kind), ("KES_BOOTSTRAP_SERVERS", given)):
        if value:
            monkeypatch.setenv(name, value)
    with nullcontext() if ":1" in servers else pytest.raises(ConfigError, match=servers), session_broker() as broker:
        assert broker.bootstrap_servers == servers
    assert FakeContainer.running == 0


def test_a_docker_engine_that_is_silent_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: Any, **options: Any) -> None:
        raise subprocess.TimeoutExpired("docker", options["timeout"])

    monkeypatch.setattr(subprocess, "run", silent)
    assert not docker_answers()


def test_a_docker_address_without_an_engine_is_none_and_soon_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    began = time.monotonic()
    assert not docker_answers()
    assert time.monotonic() - began < 30


def test_prefixes_are_topic_names_and_never_the_same(request: pytest.FixtureRequest, topic_prefix: str) -> None:
    assert topic_prefix.startswith("test_prefixes_are_topic_names_and_never_")
    assert GivenBroker("a:1").bootstrap_servers == "a:1"
    assert not set(topic_prefix) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
