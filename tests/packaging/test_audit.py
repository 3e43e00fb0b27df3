"""Known vulnerabilities of the packages in the lock files, by pip-audit, where its data can be had."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["build", "demo", "dev", "faust"])
def test_no_package_has_a_known_vulnerability(name: str) -> None:
    assert UV is not None
    audit = [UV, "tool", "run", "--quiet", "pip-audit", "--no-deps", "--disable-pip", "--format=json"]
    ended = subprocess.run(
        [*audit, "--progress-spinner=off", "--requirement", str(ROOT / "requirements" / f"{name}.txt")],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    if not ended.stdout:
        pytest.skip(f"pip-audit has no answer here: {ended.stderr.strip()[-300:]}")
    packages = json.loads(ended.stdout)["dependencies"]
    audited = [package for package in packages if "skip_reason" not in package]
    if not audited:
        pytest.skip(f"the registry has no data of vulnerabilities: {packages[0]['skip_reason']}")
    found = {package["name"]: [known["id"] for known in package["vulns"]] for package in audited if package["vulns"]}
    assert found == {}, ended.stdout
