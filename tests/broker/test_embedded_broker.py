"""The embedded Kafka as its users meet it: started, shared, killed, frozen, restarted, orphaned, left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from streams.broker import KafkaBroker, kafka_broker
from streams.broker.guardian_handle import GRACE_SECONDS
from streams.broker.probe import free_port, metadata
from streams.errors import EmbeddedBrokerError
from streams.testing.fixtures import BrokerAddress, OwnBroker
from tests.broker.embedded_kit import alive, consume, make_topic, produce
from tests.broker.gate import gate
from tests.unit.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]


def port_of(broker: KafkaBroker) -> int:
    return int(broker.bootstrap_servers.rpartition(":")[2])


# -- one broker -------------------------------------------------------------------------------------------------------


def test_records_go_through_the_session_broker(kafka_broker: BrokerAddress, topic_prefix: str) -> None:
    topic = topic_prefix + "rows"
    make_topic(kafka_broker.bootstrap_servers, topic)
    produce(kafka_broker.bootstrap_servers, topic, ["a", "b"])
    assert consume(kafka_broker.bootstrap_servers, topic, 2) == ["a", "b"]


def test_killed_and_restarted_it_has_every_acknowledged_row(own_broker: OwnBroker) -> None:
    broker = own_broker()
    address, first = broker.bootstrap_servers, broker.pid
    assert first is not None
    make_topic(address, "rows")
    rows = [str(number) for number in range(5000)]
    produce(address, "rows", rows)
    broker.kill()
    assert not broker.is_running
    assert not alive(first)
    assert broker.bootstrap_servers == address
    broker.restart()
    assert broker.pid != first
    assert broker.bootstrap_servers == address
    assert consume(address, "rows", len(rows)) == rows
    with pytest.raises(EmbeddedBrokerError, match="started already"):
        broker.start()


@pytest.mark.nightly
def test_a_broker_that_ended_by_itself_is_noticed_and_can_be_restarted(own_broker: OwnBroker) -> None:
    broker = own_broker()
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGKILL)
    wait_until(lambda: not broker.is_running)
    assert "not running" in repr(broker)
    broker.kill()  # nothing to kill is no error
    broker.restart()
    assert metadata(port_of(broker)) is not None


@pytest.mark.nightly
def test_frozen_it_is_silent_and_thawed_it_answers(own_broker: OwnBroker) -> None:
    broker = own_broker()
    broker.freeze()
    wait_until(lambda: psutil.Process(broker.pid).status() == psutil.STATUS_STOPPED)
    assert broker.is_running
    assert metadata(port_of(broker), timeout=0.5) is None
    broker.thaw()
    wait_until(lambda: metadata(port_of(broker)) is not None)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.nightly
def test_a_frozen_broker_can_be_stopped(tmp_path: Path, kept: bool) -> None:
    with KafkaBroker(data_dir=tmp_path / "data" if kept else None) as broker:
        pid = broker.pid
        assert pid is not None
        broker.freeze()
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        began = time.monotonic()
    assert time.monotonic() - began < GRACE_SECONDS
    assert not alive(pid)


# -- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_named_data_outlive_the_broker_on_any_port(tmp_path: Path) -> None:
    folder = tmp_path / "kept here"
    with KafkaBroker(data_dir=folder) as broker:
        first = broker.bootstrap_servers
        make_topic(first, "rows")
        produce(first, "rows", ["a", "b"])
        broker.restart()
        assert (broker.bootstrap_servers, consume(first, "rows", 2)) == (first, ["a", "b"])
    port = free_port(frozenset((int(first.rpartition(":")[2]),)))
    with KafkaBroker(data_dir=folder, port=port) as broker:
        assert port_of(broker) == port
        assert consume(broker.bootstrap_servers, "rows", 2) == ["a", "b"]


@pytest.mark.nightly
def test_unnamed_data_end_with_the_broker() -> None:
    broker = KafkaBroker().start()
    folder = broker.data_dir
    assert folder is not None
    assert (folder / "kafka.log").exists()
    broker.stop()
    assert not folder.exists()
    broker.stop()
    with broker.start():
        assert broker.is_running  # the same object again, with data of its own
        assert broker.data_dir != folder


# -- what can go wrong ------------------------------------------------------------------------------------------------


def test_port_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(EmbeddedBrokerError, match=f"port {port} on 127.0.0.1 is taken"):
            KafkaBroker(port=port).start()


@pytest.mark.nightly
def test_a_free_port_that_somebody_else_takes_first_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = iter([server.getsockname()[1]])
        monkeypatch.setattr(kafka_broker, "free_port", lambda *avoid: next(ports, None) or free_port(*avoid))
        with KafkaBroker() as broker:
            assert port_of(broker) != server.getsockname()[1]


@pytest.mark.nightly
def test_a_data_folder_belongs_to_one_broker(
    own_broker: OwnBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = own_broker(data_dir=tmp_path / "data")
    with monkeypatch.context() as patched:
        patched.setattr(kafka_broker, "GuardianHandle", None)  # nothing of a second one may touch these files
        with pytest.raises(EmbeddedBrokerError, match=r"data folder .* is in use by another broker"):
            KafkaBroker(data_dir=tmp_path / "data").start()
    first.stop()
    own_broker(data_dir=tmp_path / "data")


@pytest.mark.nightly
def test_a_data_folder_is_held_by_the_broker_itself(tmp_path: Path) -> None:
    with KafkaBroker(data_dir=tmp_path) as broker:
        assert broker.pid is not None
        held = [file.path for file in psutil.Process(broker.pid).open_files()]
        assert str(tmp_path / "kes.lock") in held


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "diary.txt").write_text("mine")
    with pytest.raises(EmbeddedBrokerError, match=r"holds files, but none of a broker's"):
        KafkaBroker(data_dir=tmp_path).start()
    assert (tmp_path / "data" / "diary.txt").read_text() == "mine"


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedBrokerError, match=r"file/data cannot be used"):
        KafkaBroker(data_dir=tmp_path / "file" / "data").start()


def test_disk_full_while_the_data_folder_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copytree", full)
        with pytest.raises(EmbeddedBrokerError, match=r"disk is full under the data folder"):
            KafkaBroker(data_dir=tmp_path / "data").start()
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(EmbeddedBrokerError, match=r"disk is full: a broker's data needs"):
            KafkaBroker(data_dir=tmp_path / "data").start()
    with KafkaBroker(data_dir=tmp_path / "data") as broker:  # nothing half made is in the way
        assert broker.is_running


@pytest.mark.nightly
def test_a_restart_on_a_full_disk_says_so(own_broker: OwnBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = own_broker()
    broker.kill()
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(EmbeddedBrokerError, match=r"disk is full: a broker's data needs"):
            broker.restart()
    broker.restart()
    assert broker.is_running


def test_a_refused_property_is_shown_with_the_last_lines() -> None:
    with pytest.raises(EmbeddedBrokerError, match=r"(?s)refuses a server property.*last lines.*num\.partitions"):
        KafkaBroker(properties={"num.partitions": "many"}).start()


def test_a_start_that_takes_too_long_is_given_up() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(EmbeddedBrokerError, match=r"did not serve within 0\.1 s"):
        KafkaBroker(start_timeout=0.1).start()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_an_interrupted_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    monkeypatch.setattr(kafka_broker, "metadata", interrupted)
    broker = KafkaBroker()
    with pytest.raises(KeyboardInterrupt):
        broker.start()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert broker.data_dir is None


# -- left behind ------------------------------------------------------------------------------------------------------


def kes(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from streams.cli.main import run; run()", "broker", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.fixture
def name(topic_prefix: str) -> Iterator[str]:
    """A name for a broker of the command line, which is gone after the test."""
    given = topic_prefix[-10:-1]
    yield given
    kes("stop", "--name", given)


def listed(name: str) -> list[dict[str, Any]]:
    return [broker for broker in json.loads(kes("status", "--json").stdout) if broker["name"] == name]


@pytest.mark.slow
def test_command_line_broker_outlives_its_command(name: str, tmp_path: Path) -> None:
    arguments = ("--name", name, "--port", "0", "--data-dir", str(tmp_path / "data"), "--set", "num.partitions=3")
    started = kes("start", *arguments, "--json")
    assert started.returncode == 0, started.stderr
    facts = json.loads(started.stdout)
    make_topic(facts["bootstrap_servers"], "rows")
    produce(facts["bootstrap_servers"], "rows", ["a"])
    assert listed(name) == [{**facts, "answers": True}]
    assert facts["bootstrap_servers"] in kes("status").stdout

    again = kes("start", *arguments)
    assert again.returncode == 1
    assert f"the broker '{name}' runs already at {facts['bootstrap_servers']}" in again.stderr
    assert "Traceback" not in again.stderr

    stopped = kes("stop", "--name", name, "--json")
    assert json.loads(stopped.stdout) == {"name": name, "stopped": True}
    assert not alive(facts["pid"])
    assert not alive(facts["keeper_pid"])
    assert listed(name) == []
    assert json.loads(kes("stop", "--name", name, "--json").stdout) == {"name": name, "stopped": False}

    facts = json.loads(kes("start", *arguments, "--json").stdout)
    assert consume(facts["bootstrap_servers"], "rows", 1) == ["a"]


@pytest.mark.parametrize("victim", ["pid", "keeper_pid"])
@pytest.mark.nightly
def test_command_line_broker_that_was_killed_is_not_listed_and_its_name_is_free(name: str, victim: str) -> None:
    facts = json.loads(kes("start", "--name", name, "--port", "0", "--json").stdout)
    os.kill(facts[victim], signal.SIGKILL)
    wait_until(lambda: not alive(facts["pid"]) and not alive(facts["keeper_pid"]))
    assert listed(name) == []
    assert Path(facts["data_dir"]).exists() == (victim == "keeper_pid")
    shutil.rmtree(facts["data_dir"], ignore_errors=True)
    again = kes("start", "--name", name, "--port", "0")
    assert again.returncode == 0
    assert "export KES_BOOTSTRAP_SERVERS=127.0.0.1:" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("start", "--set", "nonsense"), "--set must be NAME=VALUE"),
        (("start", "--set", "node.id=5"), "node.id belongs to the embedded broker"),
        (("start", "--name", "../x"), "a broker's name is"),
    ],
)
def test_command_line_mistakes_are_told_plainly(arguments: tuple[str, ...], said: str) -> None:
    answer = kes(*arguments)
    assert answer.returncode == 1
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("ended_by", gate([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], signal.SIGINT))
def test_a_start_that_is_interrupted_leaves_nothing_running(name: str, ended_by: signal.Signals) -> None:
    command = [sys.executable, "-c", "from streams.cli.main import run; run()", "broker", "start"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, "--name", name, "--port", "0"], env=environment, stderr=subprocess.DEVNULL
    ) as process:
        started: list[psutil.Process] = []

        def broker_is_there() -> bool:
            started[:] = psutil.Process(process.pid).children(recursive=True)
            with contextlib.suppress(psutil.NoSuchProcess):
                return any("kafka.Kafka" in child.cmdline() for child in started)
            return False

        wait_until(broker_is_there)
        process.send_signal(ended_by)
        assert process.wait(30) != 0
    wait_until(lambda: not any(alive(child.pid) for child in started))
    assert listed(name) == []
