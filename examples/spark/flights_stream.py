"""Files in a folder as a stream of typed events into Kafka; an event source; its facts as Parquet, and a plot.

    python -m examples.spark.flights_stream --out out/flights-stream --days 14

needs an empty broker (``kes broker start``) and ``pip install 'kafka-event-source[demo]'``. Run it again with more
days: the files that are new are sent, the aircraft go on from the state they have, and the picture is drawn anew.

1. A day of flights is a CSV file in ``OUT/days``, as if somebody put one there every day.
2. Spark's file source takes them one after the other; each file is a batch, a batch is one transaction.
3. ``examples.flights.aircraft`` folds the flights of each aircraft and tells of turnarounds and delays made up for.
4. Spark reads these facts back, typed, writes them as Parquet, and draws who is quick on the ground.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import pyspark.sql.functions as f
from matplotlib.figure import Figure
from pyspark.sql import DataFrame, SparkSession

import streams.spark as kes_spark
from examples.flights import ingest
from examples.flights.cluster import Cluster
from examples.flights.events import AIRCRAFT_GROUP, FACTS_TOPIC, FLIGHTS_TOPIC, DelayRecovered, Turnaround
from examples.flights.fleet import passed
from examples.flights.workers import Workers
from examples.spark.common import command_line, read

PATIENCE_SECONDS = 300.0


def deliver(folder: Path, days: int) -> list[Path]:
    """Put the first ``days`` days of flights into ``folder``, a file each; files that are there already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    year = folder.parent / "year.csv"
    ingest.unpack(year, None)
    with year.open() as lines:
        header, *rows = csv.reader(lines)
    rows.sort(key=day_of)  # in the file October follows January
    files = []
    for number, (day, flights) in enumerate(groupby(rows, key=day_of), start=1):
        if number > days:
            break
        target = folder / "{:04d}-{:02d}-{:02d}.csv".format(*day)
        files.append(target)
        if target.exists():
            continue
        unfinished = target.with_suffix(".part")
        with unfinished.open("w", newline="") as out:
            csv.writer(out).writerows([header, *flights])
        os.utime(unfinished, (number, number))  # the file source takes the oldest first
        unfinished.rename(target)  # whole files only: it looks at a file once
    year.unlink()
    return files


def day_of(row: list[str]) -> tuple[int, ...]:
    """Year, month and day."""
    return tuple(int(field) for field in row[:3])


def send(spark: SparkSession, servers: str, folder: Path, checkpoint: Path) -> None:
    """Send the files that have not been sent yet, in the order of their days, each in one transaction, exactly once."""
    flights = (
        spark.readStream.schema(ingest.COLUMNS)
        .options(header=True, nullValue="NA", mode="FAILFAST", pathGlobFilter="*.csv", maxFilesPerTrigger=1)
        .csv(str(folder))
    )
    query = (
        ingest.encoded(flights)
        .writeStream.format("grt")
        .option("kafka.bootstrap.servers", servers)
        .option("topic", FLIGHTS_TOPIC)
        .option("sink", "flights-of-the-day")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def fold(servers: str, log: Path) -> None:
    """Run the event source of the aircraft until it has handled every flight that is there."""
    cluster = Cluster(servers)
    try:
        last = cluster.last_records(FLIGHTS_TOPIC)
        with log.open("ab") as file:
            workers = Workers("examples.flights.aircraft:source", 2, name=AIRCRAFT_GROUP, servers=servers, log=file)
            try:
                deadline = time.monotonic() + PATIENCE_SECONDS
                while not passed(cluster.reach(AIRCRAFT_GROUP), last):
                    if not workers.running or time.monotonic() > deadline:
                        raise SystemExit(f"the aircraft do not get on; see {log}")
                    time.sleep(0.2)
            finally:
                workers.stop()
    finally:
        cluster.close()


def facts(spark: SparkSession, servers: str) -> DataFrame:
    """What the event source has told, one row for each fact: flight_id, tail, carrier, airport, minutes, fact."""
    both = kes_spark.events(read(spark, servers, FACTS_TOPIC), [Turnaround, DelayRecovered], on_error="fail")
    fields = [
        f.coalesce(f"Turnaround.{name}", f"DelayRecovered.{name}").alias(name)
        for name in ("flight_id", "tail", "carrier", "airport", "minutes")
    ]
    # Each is told twice, to the board of its airline and to that of its airport.
    told = both.where(f.col("_meta.key").cast("string").startswith("airline:"))
    return told.select(*fields, f.col("_meta.type").alias("fact"))


def on_the_ground(facts: DataFrame) -> dict[str, tuple[int, float]]:
    """Airline to (turnarounds, median minutes)."""
    rows = (
        facts.where("fact = 'Turnaround'")
        .groupBy("carrier")
        .agg(f.count("*").alias("turnarounds"), f.median("minutes").alias("minutes"))
        .collect()
    )
    return {row.carrier: (row.turnarounds, row.minutes) for row in rows}


def draw(airlines: Mapping[str, tuple[int, float]], target: Path) -> None:
    """A PNG of median turnarounds, the quickest airline on top."""
    order = sorted(airlines, key=lambda carrier: -airlines[carrier][1])
    names = ingest.airline_names()
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    labels = [f"{names.get(carrier, carrier)} ({airlines[carrier][0]:,})" for carrier in order]
    axes.barh(labels, [airlines[carrier][1] / 60 for carrier in order])
    axes.set_xlabel("median hours from a landing to the next departure out of New York (number of turnarounds)")
    figure.savefig(target, dpi=120, format="png")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for files, checkpoint, Parquet and plot")
    parser.add_argument("--days", type=int, default=14, help="of 365")
    given = parser.parse_args()
    run(given.servers, given.out, given.days)


def run(servers: str, out: Path, days: int) -> None:
    """All four steps."""
    cluster = Cluster(servers)
    cluster.create_topics()
    cluster.close()
    print(f"{len(deliver(out / 'days', days))} files")
    spark = kes_spark.local_session("flights-stream")
    try:
        send(spark, servers, out / "days", out / "checkpoint")
        fold(servers, out / "workers.log")
        facts(spark, servers).write.mode("overwrite").partitionBy("fact").parquet(str(out / "facts"))
        kept = spark.read.parquet(str(out / "facts"))
        kept.groupBy("fact").count().show()
        draw(on_the_ground(kept), out / "turnarounds.png")
        print(f"facts: {out / 'facts'}   picture: {out / 'turnarounds.png'}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
