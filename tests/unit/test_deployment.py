"""What ``deploy/`` has: ``kes run`` as the first process of a container, the unit of systemd, the manifests."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from streams.cli.run import run
from tests.unit.test_cli_run import NOTES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DEADLINE_SECONDS = 60.0
OPTIONS = inspect.signature(run).parameters
NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]

WITH_CHILD = (
    NOTES
    + """
import subprocess
child = Source.run
def with_child(self):
    Path("child-" + os.environ["KES_INSTANCE_ID"]).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    child(self)
Source.run = with_child
"""
)


def wait_until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


@pytest.fixture
def first_process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``unshare``, whose only child is ``kes run`` with two workers, as process 1 of a namespace of its own."""
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        pytest.skip("no namespace of processes can be made here")
    (tmp_path / "notes.py").write_text(WITH_CHILD)
    command = [*NAMESPACE, sys.executable, "-m", "streams", "run", "notes:source", "-n", "2", "--instance-prefix", "w"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    running = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2 or running.poll() is not None)
        yield running
    finally:
        for pid in children(running.pid) if running.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        running.communicate(timeout=DEADLINE_SECONDS)


def test_as_process_one_it_drains_at_sigterm_and_leaves_with_zero(
    first_process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """The kernel gives process 1 no default action for a signal: without a handler SIGTERM would do nothing."""
    (one,) = children(first_process.pid)
    os.kill(one, signal.SIGTERM)
    assert first_process.wait(DEADLINE_SECONDS) == 0
    assert sorted(path.name for path in tmp_path.glob("drained-*")) == ["drained-w-0", "drained-w-1"]


def test_as_process_one_it_reaps_its_workers_and_what_they_leave_behind(
    first_process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """A killed worker's own processes become children of process 1, and stay zombies if it does not wait for them."""
    (one,) = children(first_process.pid)
    worker = next(pid for pid in children(one) if children(pid))
    (orphan,) = children(worker)
    os.kill(worker, signal.SIGKILL)
    for path in tmp_path.glob("ready-*"):
        path.unlink()
    wait_until(lambda: list(tmp_path.glob("ready-*")))  # it was started again
    assert not Path(f"/proc/{worker}").exists()
    os.kill(orphan, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{orphan}").exists())
    assert not [pid for pid in children(one) if is_zombie(pid)]
    os.kill(one, signal.SIGTERM)
    assert first_process.wait(DEADLINE_SECONDS) == 0


def test_the_unit_is_what_systemd_takes(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd/kes@.service").read_text()
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.M)[0]) > drain_seconds()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "kes@shop.service"
    unit.write_text(text.replace("/opt/kes/%i/.venv/bin/kes", sys.executable))
    said = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stderr) == (0, "")


def test_a_pod_has_the_time_that_a_drain_takes_and_the_probes_that_there_are() -> None:
    """The manifests are valid for the schemas of Kubernetes 1.31 (kubernetes-validate 1.37, strict)."""
    kinds = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes/statefulset.yaml").read_text())}
    pod = kinds["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = {word.partition("=")[0]: word.partition("=")[2] for word in container["args"][1:]}
    assert pod["terminationGracePeriodSeconds"] > float(options["--drain-seconds"]) >= drain_seconds()
    assert options["--instance-prefix"] == "$(POD_NAME)"
    assert [container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness")] == ["/live", "/ready"]
    port: Any = options["--metrics"].rpartition(":")[2]
    assert {each["containerPort"] for each in container["ports"]} == {int(port)}
    entry = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", (DEPLOY / "container/Containerfile").read_text(), re.M)
    words = [word for line in entry for word in yaml.safe_load(line)]
    for option in [*options, *(word for word in words if word.startswith("--"))]:
        assert option.removeprefix("--").replace("-", "_") in OPTIONS


def drain_seconds() -> float:
    """The default of ``--drain-seconds``."""
    default: float = OPTIONS["drain_seconds"].default
    return default
