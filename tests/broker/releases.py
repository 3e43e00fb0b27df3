"""The code of a release of before, out of the history: for members of two releases in one group."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.broker.battery_kit import ROOT

BEFORE = "e38ba793add7691185b822598162e5774624ba1e"
"""The last commit before the rooms of today: what is installed where this code is rolled out first."""


def unpack(commit: str, tree: Path) -> bool:
    """Put the code of a commit there; ``False``: the history is not here (a source tarball, a shallow clone)."""
    found = subprocess.run(["git", "archive", commit, "streams", "tests"], cwd=ROOT, capture_output=True)
    if found.returncode != 0:
        return False
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(tree, filter="data")
    where = "import streams, tests.broker.bank as bank; print(streams.__file__, bank.__file__)"
    command, environment = [sys.executable, "-c", where], {"PYTHONPATH": str(tree)}
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    assert all(path.startswith(str(tree)) for path in ran.stdout.split()), "it is not what runs"
    return True
