"""The end of the pipeline: its tables against what SQL computes from the files, and against Kafka."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pyspark.sql import DataFrame, Row

from examples.flights.expected import Expected
from examples.flights.verify import STATE_FIELDS, Check, Read, compare
from streams.codecs import RESERVED_KEY_PREFIX

REPORT_FIELDS = ("aircraft", "flights", "arrived", "minutes_late")


def check_changes(table: DataFrame, changelog: Iterable[Read]) -> Check:
    """The streaming table has every change of the changelog, and each once."""
    check = Check("changes of the aircraft in the streaming table, once each")
    found = Counter((row.partition, row.offset) for row in table.select("partition", "offset").collect())
    for (partition, offset), times in found.items():
        if times > 1:
            check.off(f"the change at {partition}:{offset} is there {times} times")
    for record in changelog:
        key = record.key()
        if key is None or key.startswith(RESERVED_KEY_PREFIX):
            continue
        check.records += 1
        if (record.partition(), record.offset()) not in found:
            check.off(f"the change at {record.partition()}:{record.offset()} is not in the table")
    if unreadable := table.where("_error IS NOT NULL").count():
        check.off(f"{unreadable} changes cannot be read")
    check.compared = len(found)
    return check


def check_rows(name: str, rows: list[Row], key: str, wanted: Mapping[str, Mapping[str, Any]]) -> Check:
    """A materialized view against what must be in it, by the column ``key``."""
    check = Check(name)
    keys = Counter(row[key] for row in rows)
    for repeated, times in keys.items():
        if times > 1:
            check.off(f"{repeated} has {times} rows")
    fields = REPORT_FIELDS if key == "airport" else STATE_FIELDS
    compare(check, {row[key]: row for row in rows}, wanted, fields)
    return check


def airports_of(expected: Expected) -> dict[str, dict[str, int]]:
    """The report as it must be: the aircraft by the airport where each was seen last."""
    sums: dict[str, Counter[str]] = {}
    for state in expected.aircraft.values():
        if state["last_airport"] is not None:
            of_airport = sums.setdefault(state["last_airport"], Counter())
            of_airport["aircraft"] += 1
            for field in REPORT_FIELDS[1:]:
                of_airport[field] += state[field]
    return {airport: {field: found[field] for field in REPORT_FIELDS} for airport, found in sums.items()}
