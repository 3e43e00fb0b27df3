"""The Python of a driver whose tasks encode in Java, with the points of ``proof_points`` in it."""

from __future__ import annotations

import sys
from pathlib import Path

from streams.spark.jvm import committing
from tests.spark.proof_points import ProofStreamWriter

SETTING = "spark.pyspark.driver.python"


def settings(folder: Path, jar: Path) -> dict[str, str]:
    """Settings of a session whose driver runs this module where it would run the product's."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.spark.proof_committing\n')
    program.chmod(0o755)
    frozen = {"spark.kes.committer.timeout": "15s"}
    return {"spark.jars": str(jar), SETTING: str(program), "spark.kes.tasks": "java", **frozen}


if __name__ == "__main__":
    made = committing._made
    committing._made = lambda plan: ProofStreamWriter(made(plan))  # type: ignore[assignment, return-value]
    committing.main()
