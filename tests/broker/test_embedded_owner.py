"""However its owner ends, an embedded broker ends with it, and its throw-away data too."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.testing.fixtures import OwnBroker
from tests.broker.embedded_kit import alive
from tests.broker.gate import gate
from tests.unit.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]

OWNER = """
import os, sys, time
from streams.broker import KafkaBroker
broker = KafkaBroker().start()
if sys.argv[1] == "forked":
    if os.fork() == 0:
        time.sleep(60)  # holds the owner's side of the pipe, as a worker of multiprocessing does
        os._exit(0)
print(broker.pid, broker.keeper_pid, broker.data_dir, flush=True)
if sys.argv[1] == "returns":
    sys.exit(0)
time.sleep(60)
"""


@contextlib.contextmanager
def owner(how: str) -> Iterator[tuple[subprocess.Popen[str], int, int, Path]]:
    """A process that owns a broker: it, the broker's number, the keeper's, and the broker's folder."""
    command = [sys.executable, "-c", OWNER, how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        broker, keeper, folder = process.stdout.readline().split()
        try:
            yield process, int(broker), int(keeper), Path(folder)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "ended_by", "is_frozen"),
    gate(
        [
            ("returns", None, False),
            ("sleeps", signal.SIGTERM, False),
            ("sleeps", signal.SIGKILL, False),
            ("sleeps", signal.SIGKILL, True),
            ("forked", signal.SIGKILL, False),
        ],
        ("sleeps", signal.SIGKILL, False),
    ),
)
def test_a_broker_ends_with_its_owner(how: str, ended_by: signal.Signals | None, is_frozen: bool) -> None:
    with owner(how) as (process, broker, keeper, folder):
        if is_frozen:
            os.kill(broker, signal.SIGSTOP)
        if ended_by is not None:
            assert alive(broker)
            process.send_signal(ended_by)
        process.wait(30)
        wait_until(lambda: not alive(broker) and not alive(keeper))
        assert not folder.exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12 and later, of a fork beside threads
@pytest.mark.nightly
def test_a_forked_copy_cannot_end_the_broker(own_broker: OwnBroker) -> None:
    broker = own_broker()
    child = os.fork()
    if child == 0:
        broker.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert broker.is_running
    assert broker.data_dir is not None
    assert broker.data_dir.exists()


@pytest.mark.nightly
def test_a_signal_to_the_terminals_group_is_the_owners_business() -> None:
    with owner("sleeps") as (process, broker, _, _):
        assert os.getsid(broker) != os.getsid(process.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
@pytest.mark.nightly
def test_a_broker_ends_with_its_keeper() -> None:
    with owner("sleeps") as (_, broker, keeper, folder):
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: not alive(broker))
        shutil.rmtree(folder)
