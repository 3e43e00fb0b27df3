"""What the numbers must be: SQL over the file, which shares no code with the event sources or with the ingestion.

The file is read as text, and everything is said again in SQL: windows instead of folds, joins instead of state.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import SparkSession

_FLIGHTS = """
CREATE OR REPLACE TEMP VIEW f AS
WITH typed AS (
  SELECT
    concat(lpad(year, 4, '0'), lpad(month, 2, '0'), lpad(day, 2, '0'), '-', carrier, flight, '-', origin) AS id,
    nullif(tailnum, 'NA') AS tail, carrier, flight, origin, dest, CAST(hour AS INT) AS hour,
    unix_timestamp(replace(replace(time_hour, 'T', ' '), 'Z', '')) DIV 60 + CAST(minute AS INT) AS sched_minute,
    try_cast(dep_delay AS INT) AS dep_delay, try_cast(arr_delay AS INT) AS arr_delay, try_cast(air_time AS INT) AS air,
    try_cast(left(lpad(dep_time, 4, '0'), 2) AS INT) * 60 + try_cast(right(dep_time, 2) AS INT) AS dep_clock,
    try_cast(left(lpad(arr_time, 4, '0'), 2) AS INT) * 60 + try_cast(right(arr_time, 2) AS INT) AS arr_clock
  FROM raw
)
SELECT /*+ REPARTITION(4, aircraft) */ *,
  CASE WHEN arr_delay IS NOT NULL
    THEN dep_minute + air + ((arr_clock - dep_clock - air) % 60 + 60) % 60
  END AS arr_minute
FROM (
  SELECT *, coalesce(tail, concat(carrier, '-', flight)) AS aircraft, sched_minute + dep_delay AS dep_minute FROM typed
)
"""

_MOVES = """
CREATE OR REPLACE TEMP VIEW moves AS
SELECT aircraft, id, carrier, kind, airport, minute
FROM f LATERAL VIEW stack(2, 'D', origin, dep_minute, 'E', dest, arr_minute) AS kind, airport, minute
WHERE minute IS NOT NULL
"""

_TURNAROUNDS = """
CREATE OR REPLACE TEMP VIEW turnarounds AS
SELECT id, carrier, from_airport AS airport, minute - from_minute AS minutes
FROM (
  SELECT *, lag(kind) OVER w AS from_kind, lag(airport) OVER w AS from_airport, lag(minute) OVER w AS from_minute
  FROM moves WINDOW w AS (PARTITION BY aircraft ORDER BY minute, kind, id)
)
WHERE kind = 'D' AND from_kind = 'E' AND minute - from_minute < 1440
"""

_RECOVERED = """
CREATE OR REPLACE TEMP VIEW recovered AS
SELECT id, carrier, dest AS airport, dep_delay - arr_delay AS minutes FROM f WHERE dep_delay >= 15 AND arr_delay <= 0
"""

_AIRCRAFT = """
WITH totals AS (
  SELECT aircraft, count(dep_minute) AS flights, count(arr_minute) AS arrived,
    count_if(dep_minute IS NULL) AS cancelled, sum(greatest(coalesce(arr_delay, 0), 0)) AS minutes_late
  FROM f GROUP BY aircraft
), last_seen AS (
  SELECT aircraft, max_by(airport, struct(minute, kind, id)) AS last_airport FROM moves GROUP BY aircraft
), days AS (
  SELECT aircraft, sum(air) AS minutes,
    date_format(from_utc_timestamp(timestamp_seconds(arr_minute * 60), 'America/New_York'), 'yyyy-MM-dd') AS day
  FROM f WHERE arr_minute IS NOT NULL GROUP BY aircraft, day
), longest AS (
  SELECT aircraft, min_by(struct(day, minutes), struct(-minutes, day)) AS best FROM days GROUP BY aircraft
)
SELECT t.aircraft, flights, arrived, cancelled, minutes_late, last_airport,
  coalesce(best.day, '') AS longest_day, coalesce(best.minutes, 0) AS longest_day_minutes
FROM totals t LEFT JOIN last_seen USING (aircraft) LEFT JOIN longest USING (aircraft)
"""

_BOARDS = """
WITH facts AS (
  SELECT 'T' AS kind, * FROM turnarounds UNION ALL SELECT 'R', * FROM recovered
)
SELECT coalesce(concat('airline:', carrier), concat('airport:', airport)) AS board,
  count_if(kind = 'T') AS turnarounds,
  coalesce(sum(minutes) FILTER (WHERE kind = 'T'), 0) AS turnaround_minutes,
  min(minutes) FILTER (WHERE kind = 'T') AS fastest_turnaround,
  count_if(kind = 'R') AS recovered,
  coalesce(sum(minutes) FILTER (WHERE kind = 'R'), 0) AS recovered_minutes
FROM facts GROUP BY GROUPING SETS ((carrier), (airport))
"""

_FACTS = """
SELECT 'Turnaround' AS type, id, carrier, airport, minutes FROM turnarounds
UNION ALL SELECT 'DelayRecovered', id, carrier, airport, minutes FROM recovered
"""

_HOURS = """
SELECT carrier, hour, count(dep_delay) AS flights, sum(dep_delay) AS minutes
FROM f WHERE dep_delay IS NOT NULL GROUP BY carrier, hour
"""


class Fact(msgspec.Struct, frozen=True):
    """A ``Turnaround`` or ``DelayRecovered`` as it must come out, once per board that it belongs to."""

    type: str
    flight_id: str
    board: str
    minutes: int


class Expected(msgspec.Struct, frozen=True):
    """Everything the demo is checked against.

    ``events``: how many of each type the flights topic must hold. ``aircraft``: key to the totals (fields of
    ``Aircraft``). ``facts``: each fact, once per board. ``boards``: board to its sums. ``hours``: (airline, hour) to
    (flights, minutes).
    """

    flights: int
    events: dict[str, int]
    aircraft: dict[str, dict[str, Any]]
    facts: frozenset[Fact]
    boards: dict[str, dict[str, Any]]
    hours: dict[tuple[str, int], tuple[int, int]]


def expect(spark: SparkSession, csv: Path) -> Expected:
    """Compute everything from the file. Takes some ten seconds for the whole year."""
    spark.read.csv(str(csv), header=True).createOrReplaceTempView("raw")
    for view in (_FLIGHTS, _MOVES, _TURNAROUNDS, _RECOVERED):
        spark.sql(view)
    for view in ("f", "turnarounds"):
        spark.sql(f"CACHE TABLE {view}")
    rows = spark.sql(
        "SELECT count(*) AS flights, count(dep_minute) AS departed, count(arr_minute) AS arrived FROM f"
    ).first()
    assert rows is not None
    facts = spark.sql(_FACTS).toArrow()
    both = [
        Fact(kind, flight_id, board, minutes)
        for kind, flight_id, carrier, airport, minutes in zip(*(c.to_pylist() for c in facts.columns), strict=True)
        for board in (f"airline:{carrier}", f"airport:{airport}")
    ]
    repeated = [fact for fact, times in Counter(both).items() if times > 1]
    if repeated:
        raise ValueError(f"the file names flights twice: {repeated[:3]}")
    expected = Expected(
        flights=rows.flights,
        events={
            "FlightDeparted": rows.departed,
            "FlightArrived": rows.arrived,
            "FlightCancelled": rows.flights - rows.departed,
        },
        aircraft=_by(spark, _AIRCRAFT, "aircraft"),
        facts=frozenset(both),
        boards=_by(spark, _BOARDS, "board"),
        hours={(row.carrier, row.hour): (row.flights, row.minutes) for row in spark.sql(_HOURS).collect()},
    )
    for view in ("turnarounds", "f"):
        spark.sql(f"UNCACHE TABLE {view}")
    return expected


def _by(spark: SparkSession, query: str, key: str) -> dict[str, dict[str, Any]]:
    rows = [row.asDict() for row in spark.sql(query).collect()]
    return {row.pop(key): row for row in rows}
