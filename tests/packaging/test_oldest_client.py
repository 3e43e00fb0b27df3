"""The oldest confluent-kafka that ``pyproject.toml`` takes runs what is about its clients; the newest is that of the
lock files, which all other tests have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_private_parts import TRIED

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
UNIT = ("sending", "client_consumer", "client_translate", "client_settings", "client_admin", "runtime_tail")

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(600)]


def run(*command: str, **environment: str) -> None:
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]


def test_the_oldest_client_that_is_taken(tmp_path: Path) -> None:
    if UV is None:
        pytest.skip("uv, which fetches the package, is not installed")
    oldest = f"confluent-kafka=={TRIED['confluent-kafka'].oldest}.0"
    python, path = sys.executable, f"{tmp_path}{os.pathsep}{ROOT}"
    run(UV, "pip", "install", "--quiet", "--no-deps", "--python", python, "--target", str(tmp_path), oldest)
    seen = f"import confluent_kafka as it; assert it.__file__.startswith({str(tmp_path)!r}), it.__file__"
    run(python, "-c", seen, PYTHONPATH=path)
    tests = [f"tests/unit/test_{name}.py" for name in UNIT] + ["tests/property/test_leaf_accepting.py"]
    run(python, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests, PYTHONPATH=path)
