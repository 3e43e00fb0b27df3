"""Which broker the session fixture takes."""

from __future__ import annotations

import importlib
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest

from streams.errors import ConfigError
from streams.testing import fixtures
from streams.testing.fixtures import GivenBroker, docker_answers, session_broker


class FakeEmbedded:
    bootstrap_servers = "embedded:1"

    def __enter__(self) -> FakeEmbedded:
        return self

    def __exit__(self, *_: object) -> None:
        pass


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
    monkeypatch.setattr(fixtures, "KafkaBroker", FakeEmbedded)
    monkeypatch.setattr(fixtures, "docker_answers", lambda: False)
    module = SimpleNamespace(KafkaContainer=FakeContainer)
    monkeypatch.setattr(importlib, "import_module", lambda _: module)


def taken() -> str:
    with session_broker() as broker:
        return broker.bootstrap_servers


def test_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken() == "embedded:1"
    monkeypatch.setattr(fixtures, "docker_answers", lambda: True)
    assert taken() == "docker:1"
    assert FakeContainer.running == 0
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", "given:1,given:2")
    assert taken() == "given:1,given:2"


@pytest.mark.parametrize(
    ("kind", "servers"), [("embedded", "embedded:1"), ("docker", "docker:1"), ("environment", "given:1")]
)
def test_one_kind_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, kind: str, servers: str) -> None:
    monkeypatch.setattr(fixtures, "docker_answers", lambda: True)
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", "given:1")
    monkeypatch.setenv("KES_TEST_BROKER", kind)
    assert taken() == servers


@pytest.mark.parametrize(
    ("kind", "told"), [("docker", "no Docker engine"), ("environment", "KES_BOOTSTRAP_SERVERS"), ("cloud", "one of")]
)
def test_what_was_asked_for_and_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, kind: str, told: str) -> None:
    monkeypatch.setenv("KES_TEST_BROKER", kind)
    with pytest.raises(ConfigError, match=told):
        taken()


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
