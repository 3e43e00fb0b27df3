"""``make pipeline``, the whole way: each stage is killed, every number is right, nothing is left. And its parts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("matplotlib")

from examples.flights import ingest
from examples.flights.expected import Expected
from examples.pipeline.arrivals import Arrivals
from examples.pipeline.stages import batch_is_under_way, is_being_written
from examples.pipeline.verify import airports_of, check_changes, check_rows
from examples.pipeline.work import WORKER_STAGE
from tests.broker.embedded_kit import alive
from tests.unit.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
WHOLE = [pytest.mark.slow, pytest.mark.nightly]
STATE = {
    "flights": 3, "arrived": 2, "cancelled": 0, "minutes_late": 7, "last_airport": "BOS",
    "longest_day": "2013-01-01", "longest_day_minutes": 90,
}  # fmt: skip


@pytest.fixture
def _data_is_there() -> None:
    try:
        ingest.dataset_file("flights.csv.zip")
    except ingest.DataMissing as missing:
        pytest.skip(str(missing))


def begun(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    with (folder / "messages.txt").open("wb") as messages:
        return subprocess.Popen(
            [sys.executable, "-m", "examples.pipeline.main", "--out", str(folder), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            start_new_session=True,
        )


@pytest.mark.usefixtures("_data_is_there")
@pytest.mark.parametrize("days", [pytest.param(10, marks=WHOLE)])
def test_each_stage_is_killed_and_every_number_is_right(tmp_path: Path, days: int) -> None:
    with begun(tmp_path, "--days", str(days), "--json") as run:
        out, _ = run.communicate(timeout=800)
    said = (tmp_path / "messages.txt").read_text()
    assert run.returncode == 0, said
    found = msgspec.json.decode(out)
    assert [check["name"] for check in found["checks"] if check["wrong"]] == []
    assert all(check["compared"] for check in found["checks"])
    assert found["killed"].keys() == {"files to events", "changelog to table", "report", WORKER_STAGE}
    assert all(seconds > 0 for seconds in found["killed"].values())
    assert found["runs"] >= 4
    assert (tmp_path / "airports.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_data_is_there")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=WHOLE), pytest.param(signal.SIGKILL, marks=WHOLE)]
)
def test_nothing_outlives_it(tmp_path: Path, number: int) -> None:
    with begun(tmp_path, "--days", "4", "--no-kill") as run:
        messages = tmp_path / "messages.txt"
        wait_until(lambda: "run 1 of the declarative pipeline ..." in messages.read_text(), "Spark runs", 200.0)
        children = psutil.Process(run.pid).children(recursive=True)
        assert len(children) > 4
        run.send_signal(number)
        assert run.wait(90) == (130 if number == signal.SIGINT else -signal.SIGKILL)
        wait_until(lambda: not any(alive(each.pid) for each in children), children, 90.0)
        assert "Traceback" not in messages.read_text()


def test_files_arrive_whole_and_in_their_order(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.csv" for number in range(5)]
    for file in files:
        file.write_text(file.name)
    with Arrivals(files, tmp_path / "days", seconds=0.05) as arrivals:
        wait_until(lambda: arrivals.all_arrived, "all files", 30.0)
    assert sorted(file.read_text() for file in (tmp_path / "days").iterdir()) == [file.name for file in files]
    assert not any(file.exists() for file in files)


def test_a_stage_at_work_is_seen_from_outside(tmp_path: Path) -> None:
    query = tmp_path / "_checkpoints" / "spark_catalog.default.changes" / "changes" / "0"
    for name in ("offsets", "commits"):
        (query / name).mkdir(parents=True)
    seen = []
    for file in ("offsets/0", "offsets/.1.tmp", "commits/0", "offsets/1"):
        (query / file).touch()
        seen.append(batch_is_under_way(tmp_path, "changes"))
    assert seen == [True, True, False, True]
    assert not batch_is_under_way(tmp_path, "others")
    assert not is_being_written(tmp_path / "table")
    (tmp_path / "table" / "_temporary" / "0").mkdir(parents=True)
    assert is_being_written(tmp_path / "table")


class Row(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Table:
    """The part of a DataFrame that ``check_changes`` uses. ``bad``: rows that cannot be read."""

    def __init__(self, places: list[tuple[int, int]], bad: int = 0) -> None:
        self._rows, self._bad = [Row(partition=partition, offset=offset) for partition, offset in places], bad

    def select(self, *_: str) -> Table:
        return self

    def where(self, _: str) -> Table:
        return self

    def collect(self) -> list[Row]:
        return self._rows

    def count(self) -> int:
        return self._bad


class Record:
    def __init__(self, partition: int, offset: int, key: bytes = b"N1") -> None:
        self.key, self.partition, self.offset = lambda: key, lambda: partition, lambda: offset


@pytest.mark.parametrize(
    ("table", "differences"),
    [
        (Table([(0, 1), (0, 2)]), []),
        (Table([(0, 1), (0, 2), (0, 2)]), ["the change at 0:2 is there 2 times"]),
        (Table([(0, 1)]), ["the change at 0:2 is not in the table"]),
        (Table([(0, 1), (0, 2)], bad=3), ["3 changes cannot be read"]),
    ],
    ids=["right", "twice", "lost", "unreadable"],
)
def test_a_change_too_many_or_too_few_is_found(table: Any, differences: list[str]) -> None:
    changelog: Any = [Record(0, 1), Record(0, 2)]
    assert check_changes(table, changelog).differences == differences


def test_a_wrong_row_of_a_view_is_found() -> None:
    right = Row(key="N1", **STATE)
    assert check_rows("aircraft", [right], "key", {"N1": STATE}).wrong == 0  # type: ignore[list-item]
    for rows in ([], [right, right], [Row(right, key="N2"), right], [Row(right, minutes_late=8)]):
        assert check_rows("aircraft", rows, "key", {"N1": STATE}).wrong == 1  # type: ignore[arg-type]


def test_the_report_as_it_must_be() -> None:
    states = {"N1": STATE, "N2": STATE, "N3": {**STATE, "last_airport": "LAX"}, "UA-1": {**STATE, "last_airport": None}}
    truth = Expected(flights=0, events={}, aircraft=states, facts=frozenset(), boards={}, hours={})
    found = airports_of(truth)
    assert found["BOS"] == {"aircraft": 2, "flights": 6, "arrived": 4, "minutes_late": 14}
    assert found["LAX"]["aircraft"] == 1
    assert found.keys() == {"BOS", "LAX"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [sys.executable, "-m", "examples.pipeline.main", "--out", str(tmp_path / "file" / "out")]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert run.returncode == 1
    assert str(tmp_path / "file" / "out") in run.stderr.replace("\n", "")
    assert "Traceback" not in run.stderr
