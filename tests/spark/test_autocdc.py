"""``examples/spark_autocdc.py``, a declarative pipeline whose tables follow a changelog by AutoCDC.

Spark merges into tables of a connector that knows its row-level operations. None on Maven Central loads in Spark 4.3,
so the connector is ``Lake.java`` beside this file, compiled here.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark import pipelines

from benchmarks.peers.kafka_streams import javac
from benchmarks.systems import Unavailable
from examples.bank import Account
from streams.broker import KafkaBroker
from streams.codecs import codec_for
from streams.runtime.changelog import OFFSET_KEY
from streams.sak.java import find_java
from tests.spark.log_kit import Log, seed, until
from tests.spark.proof_points import signal_job
from tests.spark.test_known_everywhere import program_environment, run_program

pytestmark = [
    pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1200),
    pytest.mark.skipif(not hasattr(pipelines, "create_auto_cdc_flow"), reason="AutoCDC is in Spark 4.3 and later"),
    pytest.mark.skipif(find_spec("grpc_status") is None, reason="needs pip install 'pyspark[pipelines]'"),
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(pyspark.__file__).parent
TOPIC = "bank.bank-events.changelog"
PARTITIONS = 3
DELETED = "__spark_autocdc_aux_state_accounts"
"""Spark's table of the deleted keys of ``accounts``, which it merges into first."""

_READ = """
import json, sys
import streams.spark as kes_spark
spark = kes_spark.local_session("reader", settings=json.loads(sys.argv[1]))
accounts = spark.table("lake.bank.accounts").select("key", "cents")
history = spark.table("lake.bank.history").select("key", "cents", "__START_AT", "__END_AT")
print(json.dumps([sorted(map(tuple, table.collect())) for table in (accounts, history)]))
"""


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The connector, for the class path of Spark's driver."""
    try:
        compiler = javac(find_java())
    except (Unavailable, LookupError) as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("classes")
    source = Path(__file__).with_name("Lake.java")
    words = [str(compiler), "--release", "17", "-nowarn", "-cp", str(HOME / "jars" / "*"), "-d", str(folder)]
    done = subprocess.run([*words, str(source)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def bank() -> Iterator[Bank]:
    with KafkaBroker() as broker:
        yield Bank(broker.bootstrap_servers)


class Bank:
    """The changelog, written as an event source does: transactions, some of them aborted, and tombstones."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self._rng = random.Random(seed())
        self._log = Log(servers)
        self._log.create(TOPIC, PARTITIONS, **{"cleanup.policy": "compact"})
        self._producer = self._log.transaction("bank")
        self._cents = 0

    def change(self, count: int) -> None:
        """Each account has many changes, and is deleted and opened again."""
        for _ in range(0, count, 50):
            self._producer.begin_transaction()
            for _ in range(50):
                self._cents += 1
                number = self._rng.randrange(40)
                value = None if self._rng.random() < 0.3 else codec_for(Account).encode(Account(self._cents))
                self._producer.produce(TOPIC, value, f"account-{number}", partition=number % PARTITIONS)
            self._producer.produce(TOPIC, b'{"offset": 1}', OFFSET_KEY, partition=self._cents % PARTITIONS)
            self._producer.flush(30)
            if self._rng.random() < 0.2:
                self._producer.abort_transaction(30)
            else:
                self._producer.commit_transaction(30)

    def spoil(self) -> None:
        """A change that is no account."""
        self._log.produce(TOPIC, b"no json", key="account-0", partition=0)
        self._log.flush()

    def tables(self) -> list[list[Any]]:
        """The accounts and their history, as the changelog has them."""
        changes: dict[str, list[tuple[int, int | None]]] = {}
        for message in self._log.records(TOPIC):
            key, value, offset = message.key(), message.value(), message.offset()
            assert key is not None
            assert offset is not None
            if key != OFFSET_KEY:
                cents = None if value is None else codec_for(Account).decode(value).cents
                changes.setdefault(key.decode(), []).append((offset, cents))
        accounts = [[key, each[-1][1]] for key, each in changes.items() if each[-1][1] is not None]
        history = [
            [key, cents, start, end]
            for key, each in changes.items()
            for (start, cents), end in zip(each, [*(offset for offset, _ in each[1:]), None], strict=True)
            if cents is not None
        ]
        return [sorted(accounts), sorted(history, key=lambda row: row[:3])]


class Pipeline:
    """Runs of ``spark-pipelines`` on the example, and its tables."""

    def __init__(self, folder: Path, classes: Path, servers: str) -> None:
        self._folder, self._servers = folder, servers
        self._java = {
            "spark.driver.extraClassPath": str(classes),
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.ui.enabled": "false",
        }
        self._lake = {"spark.sql.catalog.lake": "Lake", "spark.sql.catalog.lake.folder": str(folder / "lake")}
        specification = {
            "name": "bank",
            "storage": f"file://{folder}/storage",
            "configuration": {
                **self._lake,
                "spark.sql.shuffle.partitions": "2",
                "spark.sql.pipelines.maxFlowRetryAttempts": "0",
            },
            "libraries": [{"glob": {"include": "transformations/**"}}],
        }
        (folder / "spark-pipeline.yml").write_text(json.dumps(specification))  # JSON is YAML
        (folder / "transformations").mkdir()
        shutil.copy(ROOT / "examples" / "spark_autocdc.py", folder / "transformations")

    def run(self, killed_when: Callable[[], bool] | None = None) -> tuple[int, str]:
        """To its end, or until it is killed: the exit code, and what it said."""
        words = [str(HOME / "bin" / "spark-pipelines")]
        words += [word for name, value in self._java.items() for word in ("--conf", f"{name}={value}")]
        with (self._folder / "log").open("w") as log:
            process = subprocess.Popen(
                [*words, "run", "--spec", "spark-pipeline.yml"],
                cwd=self._folder,
                env=program_environment(KES_BOOTSTRAP_SERVERS=self._servers),
                stdout=log,
                stderr=log,
                start_new_session=True,  # with its Java and its workers, to be killed together
            )
        try:
            until(lambda: process.poll() is not None or (killed_when and killed_when()), "the run", 400)
        finally:
            signal_job(process.pid, signal.SIGKILL)
            code = process.wait(30)
        return code, (self._folder / "log").read_text()

    def merges(self, table: str) -> int:
        """How many there have been; -1 before the table exists."""
        return len(list((self._folder / "lake" / "bank" / table).glob("rows-*"))) - 1

    def tables(self) -> list[list[Any]]:
        words = [sys.executable, "-c", _READ, json.dumps(self._java | self._lake)]
        found: list[list[Any]] = json.loads(run_program(words, self._folder).splitlines()[-1])
        return found


def test_tables_follow_the_changelog(classes: Path, bank: Bank, tmp_path: Path) -> None:
    """Through kills, later changes, and a checkpoint that is lost."""
    pipeline = Pipeline(tmp_path, classes, bank.servers)
    bank.change(1_500)
    code, said = pipeline.run(killed_when=lambda: pipeline.merges("accounts") >= 1)
    assert code == -signal.SIGKILL, said[-6_000:]
    before = pipeline.merges(DELETED) - pipeline.merges("accounts")
    code, said = pipeline.run(killed_when=lambda: pipeline.merges(DELETED) - pipeline.merges("accounts") > before)
    assert code == -signal.SIGKILL, f"not killed between the two merges of a batch: {said[-6_000:]}"
    for step in ("the rest", "later changes", "all of it, into the tables that are there"):
        if step == "later changes":
            bank.change(300)
        elif step != "the rest":
            shutil.rmtree(tmp_path / "storage")
        code, said = pipeline.run()
        assert code == 0, f"{step}: {said[-6_000:]}"
        (accounts, history), expected = pipeline.tables(), bank.tables()
        assert accounts == expected[0], step
        assert history == expected[1], step
        assert len(accounts) > 10
        assert len(history) > 500


def test_a_change_that_cannot_be_read_fails_the_run(classes: Path, bank: Bank, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, classes, bank.servers)
    bank.change(100)
    bank.spoil()
    code, said = pipeline.run()
    assert code == 1
    assert f"changes: {TOPIC}[0] offset " in said, said[-6_000:]
    assert pipeline.merges("accounts") == 0
