"""The oldest confluent-kafka that may be installed: live reading and plain sends on a real broker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_private_parts import ROOT, TRIED

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]
FILES = ("broker/test_client_reading.py", "broker/test_event_producer.py", "broker/test_batch_producer.py")


def test_the_other_end_of_the_range_reads_and_sends(tmp_path: Path) -> None:
    oldest = f"confluent-kafka=={TRIED['confluent-kafka'].oldest}.*"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), oldest]
    subprocess.run([*pip, "--disable-pip-version-check"], check=True, timeout=300)
    found = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    found.pop("PYTEST_ADDOPTS", None)
    found.pop("PYTEST_XDIST_WORKER", None)
    names = "import confluent_kafka; print(confluent_kafka.__version__)"
    version = subprocess.run([sys.executable, "-c", names], env=found, capture_output=True, text=True, check=True)
    assert version.stdout.startswith(TRIED["confluent-kafka"].oldest), version.stdout
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not nightly and not soak"]
    done = subprocess.run([*tests, *(f"tests/{name}" for name in FILES)], cwd=ROOT, env=found, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()[-4_000:]
