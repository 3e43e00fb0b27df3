"""``format("grt")`` where nothing registers it: sessions, SQL views, Spark Connect, declarative pipelines, and
``streams.spark`` where PySpark is the client of Spark Connect, without Java."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from pyspark_grt import DefaultSource
from streams.sak.java import spark_java_home
from streams.spark.source import GrtDataSource
from tests.spark.conftest import MakeTopic
from tests.spark.log_kit import Log

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
needs_connect = pytest.mark.skipif(find_spec("grpc_status") is None, reason="needs pip install 'pyspark[connect]'")

_WITHOUT_JAVA = """
import sys
for name in ("py4j", "pyspark.core", "pyspark.core.context", "pyspark.java_gateway"):
    sys.modules[name] = None  # as pyspark-client has them: not at all
import pyspark.util
pyspark.util.is_remote_only = lambda: True
sys.modules["pyspark.sql.streaming.datasource"] = None  # as PySpark 4.1 has it
try:
    import streams.spark
except ModuleNotFoundError as error:
    print(error)
del sys.modules["pyspark.sql.streaming.datasource"]
import streams.spark as kes_spark
assert kes_spark.write and kes_spark.read_events and kes_spark.replay
print("imported")
"""

_CONNECTED = """
import sys
from pyspark.sql import SparkSession
import streams.spark as kes_spark
servers, source, target, folder, *tasks = sys.argv[1:]
options = {"tasks": tasks[0]} if tasks else {}
spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert type(spark).__module__.startswith("pyspark.sql.connect"), type(spark)
rows = spark.read.format("grt").option("kafka.bootstrap.servers", servers).option("subscribe", source).load()
rows = rows.select("key", "value")
result = kes_spark.write(rows, topic=target, write_id="connected", servers=servers, options=options)
print(result.written, result.rows)
stream = spark.readStream.format("grt").option("kafka.bootstrap.servers", servers).option("subscribe", source)
query = (
    stream.option("startingOffsets", "earliest").load().select("key", "value").writeStream.format("grt")
    .option("kafka.bootstrap.servers", servers).option("topic", target).option("sink", "connected").options(**options)
    .option("checkpointLocation", folder).trigger(availableNow=True).start()
)
query.awaitTermination()

def write(batch, number):
    import streams.spark as kes_spark
    kes_spark.write_batch(batch, number, sink="batches", topic=target, servers=servers)

writer = stream.load().select("key", "value").writeStream.foreachBatch(write)
try:
    writer.option("checkpointLocation", folder + "-batches").trigger(availableNow=True).start().awaitTermination()
except Exception as error:
    print("write_batch does not work with Spark Connect" in str(error))
spark.stop()
"""

_OF_HIVE = """
import sys
from pyspark.sql import SparkSession
servers, topic, folder, write_id = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[2]").enableHiveSupport()
    .config("spark.sql.warehouse.dir", folder + "/warehouse")
    .config("javax.jdo.option.ConnectionURL", f"jdbc:derby:;databaseName={folder}/metastore;create=true")
    .getOrCreate()
)
spark.sql(
    "CREATE TABLE IF NOT EXISTS copies USING grt OPTIONS ('kafka.bootstrap.servers' '%s', subscribe '%s', topic '%s')"
    % (servers, topic, topic)
)
rows = "SELECT cast(id as string) key, cast(id as string) value, 'T' type FROM range(10)"
for _ in range(2):
    spark.sql(f"INSERT INTO copies WITH ('writeId' = '{write_id}') {rows}")
print(spark.conf.get("spark.sql.catalogImplementation"), spark.table("copies").where("type = 'T'").count())
"""

_PIPELINE = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
BROKER = {{"kafka.bootstrap.servers": "{servers}"}}


@dp.table
def raw():
    stream = spark.readStream.format("grt").options(**BROKER).option("subscribe", "{source}")
    return stream.option("startingOffsets", "earliest").load().select("key", "value")


@dp.materialized_view
def counts():
    return spark.read.table("raw").groupBy("key").count()


dp.create_sink("copy", "grt", {{**BROKER, "topic": "{target}", "sink": "copy", "tasks": "{tasks}"}})


@dp.append_flow(target="copy")
def to_kafka():
    return spark.readStream.table("raw")
"""


def program_environment(**more: str) -> dict[str, str]:
    """The environment of a program of its own that finds Java and this package."""
    return {
        **os.environ,
        "JAVA_HOME": str(spark_java_home()),
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        **more,
    }


def run_program(words: list[str], folder: Path, **more: str) -> str:
    """Run it; what it prints."""
    environment = program_environment(**more)
    ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


@pytest.fixture(params=["python", "java"])
def tasks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kes_jar: Path | None, tmp_path: Path) -> str:
    """What encodes rows: in Java, Spark's own settings have the jar."""
    if request.param == "java":
        if kes_jar is None:
            pytest.skip("there is no JDK")
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf" / "spark-defaults.conf").write_text(f"spark.jars {kes_jar}\n")
        monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "conf"))
    return str(request.param)


def values(log: Log, topic: str) -> list[str]:
    return sorted((message.value() or b"").decode() for message in log.records(topic))


@pytest.mark.slow  # a Spark of its own: what it finds by itself is what users have
def test_a_session_that_registers_nothing(
    spark: SparkSession, servers: str, log: Log, make_topic: MakeTopic, tmp_path: Path
) -> None:
    """Another session knows none of the sources that were registered in the first one."""
    plain = spark.newSession()
    topic, copy = make_topic(), make_topic("copy")
    log.send(topic, range(5))
    where: Mapping[str, str] = {"kafka.bootstrap.servers": servers, "subscribe": topic}
    assert plain.read.format("grt").options(**where).load().count() == 5
    options = ", ".join(f"'{name}' '{value}'" for name, value in where.items())
    plain.sql(f"create temporary view flights using grt options ({options})")
    assert plain.sql("select max(offset) from flights").collect()[0][0] == 4
    stream = plain.readStream.format("grt").options(**where).option("startingOffsets", "earliest").load()
    writer = stream.select("key", "value").writeStream.format("grt").option("checkpointLocation", str(tmp_path / "c"))
    writer = writer.option("kafka.bootstrap.servers", servers).option("topic", copy).option("sink", copy)
    writer.trigger(availableNow=True).start().awaitTermination()
    assert values(log, copy) == ["0", "1", "2", "3", "4"]


def test_the_source_that_spark_finds_is_the_one_for_clusters() -> None:
    """It stages nothing in a temporary folder, which the workers of a cluster do not share."""
    assert DefaultSource is GrtDataSource
    assert (DefaultSource.name(), DefaultSource.one_machine) == ("grt", False)


def test_the_package_is_imported_without_java_but_not_with_an_older_pyspark(tmp_path: Path) -> None:
    refused, imported = run_program([sys.executable, "-c", _WITHOUT_JAVA], tmp_path).splitlines()
    assert refused.startswith("streams.spark needs pyspark>=4.2: pip install")
    assert imported == "imported"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tasks", ["java"], indirect=True)
def test_a_table_of_hives_catalog(servers: str, make_topic: MakeTopic, tmp_path: Path, tasks: str) -> None:
    """A metastore in a folder. The options that were given when the table was made are there in a later session."""
    topic = make_topic()
    for written, write_id in ((10, "first"), (20, "second")):
        words = [sys.executable, "-c", _OF_HIVE, servers, topic, str(tmp_path), write_id]
        assert run_program(words, tmp_path) == f"hive {written}\n", tasks


@needs_connect
@pytest.mark.nightly
@pytest.mark.slow
def test_spark_connect(servers: str, log: Log, make_topic: MakeTopic, tmp_path: Path, tasks: str) -> None:
    source, target = make_topic(), make_topic("target")
    log.send(source, range(100))
    words = [sys.executable, "-c", _CONNECTED, servers, source, target, str(tmp_path / "checkpoint"), tasks]
    assert run_program(words, tmp_path) == "True 100\nTrue\n"
    assert values(log, target) == sorted(2 * [str(number) for number in range(100)])


@needs_connect
@pytest.mark.nightly
@pytest.mark.slow
def test_a_declarative_pipeline(servers: str, log: Log, make_topic: MakeTopic, tmp_path: Path, tasks: str) -> None:
    source, target = make_topic(), make_topic("target")
    log.send(source, range(100))
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "flights.py").write_text(
        _PIPELINE.format(servers=servers, source=source, target=target, tasks=tasks)
    )
    (tmp_path / "spark-pipeline.yml").write_text(
        f"name: flights\nstorage: file://{tmp_path}/storage\nlibraries:\n  - glob:\n      include: transformations/**\n"
    )
    began = time.time()
    command = Path(pyspark.__file__).parent / "bin" / "spark-pipelines"
    run_program([str(command), "run", "--spec", str(tmp_path / "spark-pipeline.yml")], tmp_path)
    print(f"the pipeline took {time.time() - began:.0f} s")
    assert values(log, target) == sorted(str(number) for number in range(100))
