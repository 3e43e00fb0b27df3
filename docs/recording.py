"""Makes the terminal recording of the README: ``python docs/recording.py`` does it again, with a Kafka of its own.

Every line was written by the commands that are shown; of the workers' messages only starts and ends are kept.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Final

from streams.broker import KafkaBroker

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- a recording, made by docs/recording.py -->\n```\n"
END: Final = "```\n<!-- its end -->"
SOURCE: Final = "examples.bank:source"
RUN: Final = f"kes run {SOURCE} --workers 2 --instance-prefix vm"
STEPS: Final = (
    f"kes topics apply {SOURCE}",
    f"{RUN} &",
    "python -m examples.bank_feed 10000",
    "kill -9 PID; python -m examples.bank_feed 5000",
    f"kes state scan {SOURCE} --limit 3",
    "kill %1; wait",
)
PATIENCE_SECONDS: Final = 60.0
_WORKER: Final = re.compile(r"vm-\d: (?!the group knows).*")


class Recorder:
    """Runs the steps, and keeps what is written."""

    def __init__(self, servers: str, workers: IO[str]) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {
            **os.environ, "KES_BOOTSTRAP_SERVERS": servers, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "SEED": "7"
        }  # fmt: skip
        self._workers = workers
        self._read = 0

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start the workers; what they write goes into the file."""
        return subprocess.Popen(
            command.split(), cwd=ROOT, env=self._environment, stdout=subprocess.DEVNULL, stderr=self._workers, text=True
        )

    def run(self, command: str) -> list[str]:
        """Run a command to its end; return what it wrote."""
        ended = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=self._environment, text=True, capture_output=True, timeout=120
        )
        if ended.returncode:
            raise RuntimeError(f"{command}: {ended.stderr}")
        return [line.rstrip() for line in ended.stdout.splitlines() if line.strip()]

    def until(self, said: str, count: int = 1) -> list[str]:
        """Wait until the workers have said so, that often; return the lines about them that were not shown yet."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (text := Path(self._workers.name).read_text()[self._read :]).count(said) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the workers do not say {said!r}: {text}")
            time.sleep(0.1)
        self._read += len(text)
        return [line for line in text.splitlines() if _WORKER.fullmatch(line)]


def record(servers: str, log: Path) -> str:
    """Run the steps at this broker; return the recording."""
    lines: list[str] = []
    apply, run, feed, kill, state, stop = STEPS
    with log.open("w") as workers:
        recorder = Recorder(servers, workers)
        lines += [f"$ {apply}", *recorder.run(apply), f"$ {run}"]
        process = recorder.start(RUN)
        try:
            lines += recorder.until("started (process", 2)
            lines += [f"$ {feed}", *recorder.run(feed)]
            victim = next(
                found[1] for line in lines if (found := re.fullmatch(r"vm-0: started \(process (\d+)\)", line))
            )
            killing = kill.replace("PID", victim)
            fed = recorder.run(killing)
            lines += [f"$ {killing}", *recorder.until("start 2)"), *fed]
            lines += [f"$ {state}", *recorder.run(state), f"$ {stop}"]
            process.terminate()
            lines += recorder.until("ended: ", 2)
            process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()
            process.wait()
    return "".join(f"{line}\n" for line in lines)


def shape(recording: str) -> str:
    """Return a recording without what differs from run to run: numbers, widths of tables, the order of messages."""
    plain = re.sub(r"[\d.,:-]*\d", "0", recording)
    lines = [re.sub(r"[ ─-╿]+", " ", line).strip() for line in plain.splitlines()]
    return "\n".join(sorted({line for line in lines if line}))


def shown() -> str:
    """Return the recording in the README."""
    return README.read_text().split(BEGIN)[1].split(END)[0]


def main() -> None:
    """Make the recording again, and put it into the README."""
    log = ROOT / ".recording.log"
    try:
        with KafkaBroker() as broker:
            made = record(broker.bootstrap_servers, log)
    finally:
        log.unlink(missing_ok=True)
    README.write_text(README.read_text().replace(BEGIN + shown() + END, BEGIN + made + END))


if __name__ == "__main__":
    main()
