"""The settings file, and what a failed start is said to be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from streams.broker import KafkaBroker, diagnosis
from streams.broker.settings import server_settings
from streams.errors import ConfigError, EmbeddedBrokerError


def lines(**extra: str) -> dict[str, str]:
    text = server_settings(Path("/data"), 9092, 9093, {name.replace("_", "."): value for name, value in extra.items()})
    return dict(line.split("=", 1) for line in text.splitlines())


def test_further_properties_win() -> None:
    ours, theirs = lines(), lines(group_initial_rebalance_delay_ms="7", log_retention_ms="5")
    for name, before, after in (("group.initial.rebalance.delay.ms", "0", "7"), ("log.retention.ms", "-1", "5")):
        assert (ours[name], theirs[name]) == (before, after)


def test_values_are_written_as_java_reads_them() -> None:
    text = server_settings(Path("/Daten/Köln"), 1, 2, {"sasl.jaas.config": " a\\b\nc"})
    assert "log.dirs=/Daten/K\\u00f6ln\n" in text
    assert "sasl.jaas.config=\\ a\\\\b\\nc\n" in text
    assert text.isascii()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"properties": {name: "x"}} for name in ("node.id", "listeners", "log.dirs", "process.roles")),
        *({"port": port} for port in (0, 70000)),
        {"heap_mb": 10},
        {"start_timeout": 0.0},
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(ConfigError, match=next(iter(value)) if name == "properties" else name):
        KafkaBroker(**wrong)


def test_before_the_start_there_is_no_address() -> None:
    broker = KafkaBroker()
    assert not broker.is_running
    assert broker.pid is None
    broker.stop()
    for act in (broker.kill, broker.restart, broker.freeze, lambda: broker.bootstrap_servers):
        with pytest.raises(EmbeddedBrokerError, match=r"start\(\)"):
            act()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("KafkaException: Socket server failed to bind: Address already in use", "port 9092 .*taken"),
        ("java.io.IOException: No space left on device", "disk is full under /data"),
        ("Failed to acquire lock on file .lock in /data", "in use by another broker"),
        ("Exception: java.lang.NoClassDefFoundError: scala/Function0", "jars .* broken"),
        ("UnsupportedClassVersionError: kafka/Kafka", "too old"),
        ("OpenJDK: There is insufficient memory for the Java Runtime", "memory"),
        ("org.apache.kafka.common.config.ConfigException: Invalid value x for num.partitions", "server property"),
        ("first\nsecond thing", "ended while it started.*\n.*second thing"),
        ("", "wrote nothing"),
    ],
)
def test_a_failed_start_is_explained(said: str, told: str) -> None:
    error = diagnosis.ended(9092, Path("/data"), said)
    with pytest.raises(EmbeddedBrokerError, match=f"(?s){told}"):
        raise error


def test_a_crash_on_a_full_disk_is_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    error = diagnosis.ended(9092, Path("/"), "java.lang.InternalError: a fault occurred in an unsafe memory access")
    with pytest.raises(EmbeddedBrokerError, match="disk is full under /"):
        raise error


def test_only_what_this_start_wrote_counts(tmp_path: Path) -> None:
    log = tmp_path / "kafka.log"
    log.write_text("an old complaint\n")
    start = log.stat().st_size
    assert diagnosis.tail(log, start) == diagnosis.tail(tmp_path / "none", 0) == ""
    log.write_text("an old complaint\na new one\n")
    assert diagnosis.tail(log, start) == "a new one"
