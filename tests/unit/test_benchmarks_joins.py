"""The measure of joined tables: its judge sees every fault, and its figures are compared with the aims."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from benchmarks.joins.measure import DRAIN, HOP, JOIN, LATENCY, LOAD, ONE, SILENCE, TWO, JoinResult, Joins, sums
from benchmarks.joins.workload import FIRST_ORDERS, MISSING, Backlog, Customer, Invoiced, JoinJudge, history, row
from benchmarks.tables import markdown
from benchmarks.workload import KEYS
from streams.sak.murmur2 import partition_of

ORDERS = 3_000
Outputs = list[Invoiced]


def outputs() -> Outputs:
    """What a right system sends that takes orders and rows by time."""
    versions: dict[str, int] = {}
    found = []
    for _, key, event in history(3, ORDERS):
        if isinstance(event, Customer):
            versions[key] = event.version
        else:
            met = row(key, versions[key])
            found.append(Invoiced(key, event.number, event.cents, met.version, met.address))
    return found


def judge_of(found: Outputs) -> JoinJudge:
    judge = JoinJudge(3, ORDERS)
    for one in found:
        judge.add(one.customer, one)
    return judge


def of_version(found: Outputs, place: int, version: int) -> None:
    """Let an output have another version of its row."""
    address = row(found[place].customer, version).address if version != MISSING else ""
    found[place] = msgspec.structs.replace(found[place], version=version, address=address)


def swap(found: Outputs, first: int, second: int) -> None:
    found[first], found[second] = found[second], found[first]


FAULTS: dict[str, Callable[[Outputs, list[int]], object]] = {
    "lost": lambda found, mine: found.pop(mine[0]),
    "last lost": lambda found, mine: found.pop(),
    "twice": lambda found, mine: found.insert(mine[-1] + 1, found[mine[-1]]),
    "swapped": lambda found, mine: swap(found, mine[0], mine[1]),
    "other amount": lambda found, mine: found.append(msgspec.structs.replace(found.pop(mine[-1]), cents=0)),
    "no row": lambda found, mine: of_version(found, mine[0], MISSING),
    "a row that never was": lambda found, mine: of_version(found, mine[0], 1_000),
    "an older row than before": lambda found, mine: of_version(found, mine[0], found[mine[-1]].version + 1),
    "another's row": lambda found, mine: found.append(msgspec.structs.replace(found.pop(mine[-1]), address="x")),
}


def test_the_judge_takes_a_right_system_and_counts_the_rows_of_their_time() -> None:
    found = outputs()
    judge = judge_of(found)
    assert (judge.verdict(), judge.outputs, judge.met) == ("", ORDERS, ORDERS)
    latest = {key: event for _, key, event in history(3, ORDERS) if isinstance(event, Customer)}
    for place, one in enumerate(found):
        of_version(found, place, latest[one.customer].version)
    judge = judge_of(found)
    assert judge.verdict() == "", "a table that is read up to its end first, as goka does"
    assert ORDERS / 2 < judge.met < ORDERS


@pytest.mark.parametrize("fault", FAULTS)
def test_the_judge_sees_every_fault(fault: str) -> None:
    found = outputs()
    places: dict[str, list[int]] = {}
    for place, one in enumerate(found):
        places.setdefault(one.customer, []).append(place)
    most = {key: event.version for _, key, event in history(3, ORDERS) if isinstance(event, Customer)}
    able = [mine for key, mine in places.items() if len(mine) > 1 and found[mine[-1]].version < most[key]]
    FAULTS[fault](found, random.Random(3).choice(able))
    assert judge_of(found).verdict() != ""


def test_a_backlog_has_some_orders_first_and_all_others_in_one_transaction() -> None:
    written: list[tuple[str, list[tuple[str, str, int]]]] = []

    def write(records: Iterable[tuple[str, str, bytes, Any, int]], transactional_id: str = "") -> None:
        written.append((transactional_id, [(topic, key, at_ms) for topic, key, _, _, at_ms in records]))

    cluster: Any = SimpleNamespace(partitions=10, write=write)
    backlog = Backlog(cluster, "orders", "customers", 3, ORDERS)
    backlog.first()
    backlog.rest()
    (no_id, first), (an_id, rest) = written
    assert (no_id, bool(an_id)) == ("", True)
    assert [topic for topic, _, _ in first].count("orders") == FIRST_ORDERS
    assert len(first) + len(rest) == KEYS + ORDERS + ORDERS // 10
    times = [at_ms for _, _, at_ms in first + rest]
    assert times == sorted(times)
    places = Counter(partition_of(key.encode(), 10) for topic, key, _ in first + rest if topic == "orders")
    assert backlog.orders == [places[number] for number in range(10)]


def test_rows_are_compared_in_any_order() -> None:
    rows = [(b"a", b"1"), (b"b", b"2")]
    assert sums(rows) == sums(reversed(rows))
    assert len({sums(rows), sums([*rows, rows[0]]), sums(rows[:1]), sums([(b"a", b"2"), (b"b", b"1")])}) == 4


def test_figures_are_compared_with_their_aims_round_by_round() -> None:
    goka, ks = "goka", "kafka-streams:commit_ms=20"
    rates = {ONE: 100.0, TWO: 95.0, JOIN: 80.0, ks: 40.0, goka: 90.0}
    found = [JoinResult(DRAIN, name, turn, value=rate * turn) for turn in (1, 2) for name, rate in rates.items()]
    found.append(JoinResult(DRAIN, "quixstreams:commit_ms=100", 1, "1 output for 2 orders", 1.0))
    found.append(JoinResult(LOAD, JOIN, 1, value=300_000.0, unit="rows/s"))
    found += [JoinResult(f"{LATENCY} at 2,000/s", name, 1, value=p50, unit="ms") for name, p50 in ((ONE, 4), (HOP, 9))]
    found.append(JoinResult(f"{SILENCE}, join, 1 to 2", JOIN, 1, value=20.0, unit="ms", p99=160.0))
    aims = {aim.what: (aim.found, aim.is_met) for aim in Joins().aims(found)}
    assert aims == {
        f"drain, `{TWO}` to `{ONE}`": ("0.95 (0.95; 0.95)", True),
        f"drain, `{JOIN}` to `{ONE}`": ("0.80 (0.80; 0.80)", False),
        f"drain, `{JOIN}` to `{ks}`": ("2.00 (2.00; 2.00)", True),
        f"drain, `{JOIN}` to `{goka}`": ("0.89 (0.89; 0.89)", False),
        "load of a table, of 150,000 rows/s": ("2.00", True),
        "a hop through the loop, p50, to an output's": ("1.25", True),
        f"{SILENCE}, join, 1 to 2, joined table and lookup": ("worst 160 ms", False),
    }
    drains, others = map(markdown, Joins().tables(found))
    assert "| quixstreams:commit\\_ms=100 | - | - | - | - | no: 1 of 1 runs |" in drains
    assert f"| {LOAD} | {JOIN} | 300,000 | - | rows/s | yes |" in others
