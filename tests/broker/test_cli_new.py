"""A new project as its README has it: topics, a run, events, a look at outputs, state and dead letters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streams.testing.fixtures import BrokerAddress
from tests.broker.kes_kit import ROOT, Kes

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(120)]  # the first thing that a user tries


def test_a_new_project_runs_as_its_readme_says(kafka_broker: BrokerAddress, tmp_path: Path) -> None:
    name = f"shop_{os.getpid()}"  # its topics have it in their names, and the broker is shared
    assert Kes(kafka_broker.bootstrap_servers, tmp_path)("new", name)[0] == 0
    kes = Kes(kafka_broker.bootstrap_servers, tmp_path / name)
    readme = (tmp_path / name / "README.md").read_text().split("```")[1]
    commands = [line.partition("#")[0].split() for line in readme.splitlines() if line]
    apply, run, tail, scan, letters = (words[1:] for words in commands if words[0] == "kes" and words[1] != "broker")
    [produce] = [words[1:] for words in commands if words[:2] == ["python", "produce.py"]]
    code, _, err = kes(*apply)
    assert code == 0, err
    running = kes.start(*run)
    try:
        command = [sys.executable, *produce]
        environment = {**os.environ, "KES_BOOTSTRAP_SERVERS": kafka_broker.bootstrap_servers, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=kes.folder, env=environment, check=True, timeout=60)
        deadline = time.monotonic() + 60
        while len(shown := kes(*tail, "--json")[1].splitlines()) < 3:
            assert time.monotonic() < deadline, running.poll()
    finally:
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
    totals = [json.loads(line)["value"] for line in shown]
    assert [total["cents"] for total in totals if total["customer"] == "ann"] == [500, 750]
    entries = json.loads(kes(*scan, "--json")[1])["entries"]
    assert {entry["key"]: entry["value"] for entry in entries} == {"ann": 750, "ben": 250}
    [letter] = json.loads(kes(*letters, "--json")[1])["letters"]
    assert (letter["message"], letter["handler"]) == (
        "an order of 0 cents",
        f"{name}.make_source.<locals>.on_ordered",
    )
