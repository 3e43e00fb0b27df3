"""The sweeps of the benchmarks: shapes of the workload, what grows, what is compared. Nothing here asserts a speed."""

from __future__ import annotations

import signal
import sys
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from benchmarks.account.report import growth_of, held
from benchmarks.cluster import Cluster, type_headers
from benchmarks.drain import stretch
from benchmarks.engine import JOB_VARIABLE, source, source_of
from benchmarks.handwritten import Loop
from benchmarks.stalls.group import Stall
from benchmarks.stalls.report import beyond_ms, in_short
from benchmarks.stalls.silences import Silence, Window
from benchmarks.steady import Memory, SteadyResult, behind_of
from benchmarks.sweeps.cost import Cost, CostMeasure, at, growth
from benchmarks.sweeps.fleet import Fleet, started
from benchmarks.sweeps.idle import Idle, IdleMeasure
from benchmarks.sweeps.live import Live, LiveMeasure
from benchmarks.sweeps.shapes import DIMENSIONS, MOST_BYTES, NAMES, places, records_of, usual_size
from benchmarks.sweeps.workers import Shared, Workers, cores, scaling
from benchmarks.systems import Child, Failed, System
from benchmarks.workload import (
    STORED,
    USUAL,
    VALUE_BYTES,
    Balance,
    Deposited,
    Job,
    Judge,
    Shape,
    deposits,
    encoded,
    kind_of,
    kinds,
    note_of,
)
from streams.events import event_type_of
from tests.unit.benchmarks_kit import rows_of, run_of, shown

SHAPES = [
    USUAL,
    Shape(keys=7),
    Shape(stored=50, keys=3),
    Shape(types=10),
    Shape(partitions=400),
    Shape(value_bytes=100),
]


def job(shape: Shape = USUAL) -> Job:
    return Job(bootstrap_servers="127.0.0.1:1", group="g", source="in", output="out", changelog="log", shape=shape)


def outputs(seed: int, events: int, shape: Shape) -> list[tuple[str, Balance]]:
    """What a right system sends."""
    counts: dict[str, int] = {}
    sums: dict[str, int] = {}
    found = []
    for account, cents in islice(deposits(seed, shape), events):
        counts[account] = counts.get(account, 0) + 1
        sums[account] = sums.get(account, 0) + cents
        found.append((account, Balance(account, counts[account], sums[account], 0.0)))
    return found


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_judge_knows_the_shape(shape: Shape) -> None:
    judge = Judge(shape)
    heard = outputs(5, 200, shape)
    for key, balance in heard:
        judge.hear(key, balance)
    assert judge.verdict(5, 200) == ""
    assert judge.verdict(6, 200) != ""
    lost = Judge(shape)
    for key, balance in heard[:-1]:
        lost.hear(key, balance)
    assert lost.verdict(5, 200) != ""


def test_the_usual_shape_is_the_workload_without_any() -> None:
    assert list(islice(deposits(9), 300)) == list(islice(deposits(9, USUAL), 300))
    assert encoded("a", 5, 1.5) == encoded("a", 5, 1.5, note_of(VALUE_BYTES))
    assert kinds(1) == (Deposited,)
    assert msgspec.json.decode(msgspec.json.encode(job(Shape(types=3))), type=Job) == job(Shape(types=3))


def test_what_is_stored_comes_first_and_once_each() -> None:
    shape = Shape(stored=500, keys=2)
    first = [account for account, _ in islice(deposits(1, shape), 500)]
    assert len(set(first)) == 500
    assert all(account.startswith(STORED) for account in first)
    assert {account for account, _ in islice(deposits(1, shape), 500, 600)} == {"account-00000", "account-00001"}


@pytest.mark.parametrize("size", [100, 1_000, 100_000])
def test_values_have_the_size_that_was_asked_for(size: int) -> None:
    found = {len(encoded(account, cents, 1_700_000_000.5, note_of(size))) for account, cents in islice(deposits(2), 50)}
    assert max(found) <= size + 5
    assert min(found) >= size - 10


def test_a_value_that_cannot_be_so_small_is_refused() -> None:
    with pytest.raises(ValueError, match="an event of 60 bytes; the smallest has"):
        note_of(60)


def test_types_are_alike_and_all_come_up() -> None:
    many = kinds(100)
    names = [event_type_of(kind).name for kind in many]
    assert len(set(names)) == 100
    assert [headers[0][1] for headers in type_headers(100)] == [name.encode() for name in names]
    assert kinds(100)[7] is many[7], "the same class for everybody"
    value = encoded("account-00001", 8, 2.0)
    assert {type(msgspec.json.decode(value, type=kind)) for kind in many} == set(many)
    assert {kind_of(cents, 10) for _, cents in islice(deposits(3), 500)} == set(range(10))


def test_a_cluster_has_the_partitions_of_its_shape_unless_told_otherwise() -> None:
    assert Cluster("127.0.0.1:1").partitions == USUAL.partitions
    assert Cluster("127.0.0.1:1", shape=Shape(partitions=400)).partitions == 400
    assert Cluster("127.0.0.1:1", 4).shape.partitions == 4


def test_the_event_source_of_a_shape_is_found_by_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    of_many = job(Shape(partitions=400, types=100))
    assert source_of(of_many).config.num_partitions == 400
    monkeypatch.setenv(JOB_VARIABLE, msgspec.json.encode(of_many).decode())
    assert source().config.num_partitions == 400


# -- places ------------------------------------------------------------------------------------------------------------


def test_every_place_differs_from_the_usual_shape_in_one_dimension() -> None:
    found = list(places(NAMES, all_sizes=True))
    assert found[0].shape == USUAL
    assert len(found) == 1 + sum(len(one.sizes) for one in DIMENSIONS)
    for place in found[1:]:
        fields = msgspec.structs.asdict(place.shape)
        assert [name for name, value in msgspec.structs.asdict(USUAL).items() if fields[name] != value] == [
            next(one.field for one in DIMENSIONS if one.name == place.dimension)
        ]
    assert {place.dimension for place in places(["bytes"], all_sizes=False)} == {"usual", "bytes"}
    assert all(set(one.some) <= set(one.sizes) for one in DIMENSIONS)
    assert all(usual_size(one.name) not in one.sizes for one in DIMENSIONS)


def test_large_records_are_fewer() -> None:
    assert records_of(USUAL, 5_000) == 5_000
    assert records_of(Shape(value_bytes=100_000), 500_000) * 100_000 <= MOST_BYTES


# -- what is compared --------------------------------------------------------------------------------------------------


def cost(system: str, turn: int, us: float, dimension: str = "usual", size: int = 0, fault: str = "") -> Cost:
    return Cost(dimension=dimension, size=size, system=system, round=turn, records=10, fault=fault,
                per_second=1e6 / us, cpu_us_per_record=us)  # fmt: skip


def test_growth_is_against_the_usual_shape_of_the_same_round_and_system() -> None:
    found = [
        cost("a", 1, 4), cost("b", 1, 10), cost("a", 2, 8), cost("b", 2, 20),
        cost("a", 1, 6, "types", 100), cost("b", 1, 30, "types", 100),
        cost("a", 2, 12, "types", 100), cost("b", 2, 9, "types", 100, fault="2 outputs out of turn"),
    ]  # fmt: skip
    assert growth(found, "types", 100, "a") == [1.5, 1.5]
    assert growth(found, "types", 100, "b") == [3.0], "a run with a fault has no cost"
    assert growth(found, "types", 1, "b") == [1.0, 1.0]
    assert at(found, "types", 1) == found[:4], "the usual shape has one type"
    assert at(found, "bytes", 1_000) == []


def test_the_table_of_costs_has_the_usual_shape_in_its_place() -> None:
    found = [cost("a", 1, 4), cost("b", 1, 10), cost("a", 1, 6, "types", 100), cost("b", 1, 30, "types", 100)]
    rows = [row for row in rows_of(shown(run_of(cost=found))) if row[0] in ("1", "100")]
    assert [row[:5] for row in rows] == [
        ["1", "a", "4.0", "1.00", "1.00"],
        ["1", "b", "10.0", "2.50", "1.00"],
        ["100", "a", "6.0", "1.00", "1.50"],
        ["100", "b", "30.0", "5.00", "3.00"],
    ]
    (drawn,) = CostMeasure().plots(found)
    assert [(point.x, point.y) for point in drawn.series["b"]] == [(1, 10), (100, 30)]  # type: ignore[union-attr]


def test_a_fault_in_a_sweep_is_told() -> None:
    run = run_of(cost=[cost("a", 1, 4, fault="9 outputs for 10 events")])
    assert run.faults(of_peers=False) == ["a: 9 outputs for 10 events"]
    idle = Idle(partitions=10, system="a", round=1, seconds=1, fault="8 outputs for 10 events")
    assert run_of(idle=[idle]).faults(of_peers=False) == ["a: 8 outputs for 10 events"]


def test_workers_are_compared_with_one_of_the_same_round() -> None:
    def ran(workers: int, turn: int, rate: float, fault: str = "") -> Shared:
        return Shared(workers=workers, system="a", round=turn, records=10, fault=fault, per_second=rate,
                      cpu_us_per_record=10, broker_cpu_us_per_record=5)  # fmt: skip

    found = [ran(1, 1, 100), ran(2, 1, 180), ran(1, 2, 50), ran(2, 2, 50), ran(1, 3, 100), ran(2, 3, 900, "lost one")]
    assert scaling(found, "a", 2) == [1.8, 1.0]
    assert cores(ran(1, 1, 100_000)) == pytest.approx(1.5)
    assert ["a", "2", "115 (50; 180)", "1.40 (1.00; 1.80)"] in [
        row[:4] for row in rows_of(shown(run_of(workers=found)))
    ]


def test_the_aims_of_the_sweeps() -> None:
    def idle(partitions: int, share: float) -> Idle:
        return Idle(partitions=partitions, system="engine", round=1, seconds=9, fault="", share=share)

    aims = IdleMeasure().aims([idle(10, 0.004), idle(400, 0.03)])
    assert [(aim.found, aim.is_met) for aim in aims] == [("0.40%", True), ("3.00%", False)]

    def ran(workers: int, rate: float, us: float, system: str = "engine", fault: str = "") -> Shared:
        return Shared(workers=workers, system=system, round=1, records=10, fault=fault, per_second=rate,
                      cpu_us_per_record=us, broker_cpu_us_per_record=0)  # fmt: skip

    assert [aim.is_met for aim in Workers().aims([ran(1, 1_000, 1), ran(2, 1_800, 1)])] == [True]
    assert [aim.is_met for aim in Workers().aims([ran(1, 1_000, 1), ran(2, 1_200, 1)])] == [False]
    assert [aim.is_met for aim in Workers().aims([ran(1, 1e6, 999), ran(2, 1e6, 999)])] == [None], "too few cores"
    assert Workers().aims([ran(1, 1_000, 1)]) == []
    both = [ran(1, 1_000, 1), ran(2, 1_800, 1)]
    for rate, fault, found in ((1_500, "", ("1.20", True)), (2_000, "", ("0.90", False)), (0, "lost", None)):
        aim = Workers().aims([*both, ran(1, rate, 1, "gkes", fault)])[1]
        assert (aim.found, aim.is_met) == (found or ("`gkes` was not right", None))
    assert len(Workers().aims([ran(1, 1_000, 1), ran(1, 1_500, 1, "gkes")])) == 0, "without two workers"


def test_growth_of_memory_is_by_event() -> None:
    steady = SteadyResult("a", 1, 1_000, 60.0, 1, "", memory=Memory(1_000_000, 1_600_000, 2_000_000, []))
    assert growth_of(steady) == 20.0
    assert growth_of(SteadyResult("a", 1, 1_000, 60.0, 1, "it failed")) == 0.0


def test_a_stretch_begins_after_what_fills_the_state() -> None:
    assert stretch([-500, -10, 5, 40, 90, 100], 100) == (2, 4)


def test_whether_a_rate_was_held() -> None:
    assert behind_of(900, 50) == ""
    assert "could not keep up" in behind_of(1_500, 50)
    assert "the generator" in behind_of(5_000, 3_000), "nothing is known about the system"
    fast, slow = (SteadyResult("a", turn, 500, 1.0, 1, "", behind=text) for turn, text in ((1, ""), (2, "late")))
    assert held([fast, slow]) == [fast]


def test_live_costs_are_told_of_rates_that_were_held() -> None:
    def live(system: str, partitions: int, us: float, behind: str = "") -> Live:
        return Live(partitions=partitions, rate=500, system=system, round=1, fault="", cpu_us_per_event=us,
                    behind=behind)  # fmt: skip

    found = [live("a", 10, 8), live("b", 10, 12), live("a", 400, 9), live("b", 400, 30, "it was late")]
    rows = [row for row in rows_of(shown(run_of(live=found))) if row[1] in ("a", "b")]
    assert [[*row[:4], row[6]] for row in rows] == [
        ["10", "a", "8.0", "1.00", "yes"],
        ["10", "b", "12.0", "1.50", "yes"],
        ["400", "a", "9.0", "1.00", "yes"],
        ["400", "b", "-", "-", "no: 1 of 1 runs"],
    ]
    (drawn,) = LiveMeasure().plots(found)
    assert {name: len(points) for name, points in drawn.series.items()} == {"a": 2, "b": 1}  # type: ignore[union-attr]


def test_an_outage_is_told_without_the_absence_of_the_broker() -> None:
    stall = Stall("broker restart", 1, Window(0, 9), 1, 0, [Silence(0, 3_500, 0), Silence(1, 3_200, 1)], 2.0, "", 3_000)
    assert beyond_ms(stall) == 500
    assert "broker away for 3,000 ms" in in_short(stall)
    assert ["broker restart", "3,000", "3,500", "3,500", "500", "500", "1", "1"] in rows_of(
        shown(run_of(stalls=[stall]))
    )


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_fleet_is_looked_at_with_what_its_processes_started(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; x = bytearray(60_000_000); sys.stdin.read()'])\n"
        "sys.stdin.read()\nchild.wait()\n"
    )
    child = Child("parent", job(), tmp_path, python=Path(sys.executable))
    fleet = Fleet([child])
    try:
        while fleet.sample(0.0, 0).rss < 60_000_000:
            child.check()
        child.send(signal.SIGKILL)
        while child.is_alive:
            pass
        with pytest.raises(Failed):
            fleet.sample(0.0, 0)
    finally:
        child.stop()


def test_loops_written_by_hand_have_a_share_each(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    def child(module: str, told: Job, *_: object, **__: object) -> None:
        given.append(told.options)

    monkeypatch.setattr("benchmarks.sweeps.fleet.Child", child)
    list(started(System.parse("handwritten:events=5000"), job(), 2))
    assert given == [{"events": "5000", "share": "0/2"}, {"events": "5000", "share": "1/2"}]
    taken = [_taken(msgspec.structs.replace(job(), options=options), monkeypatch) for options in given]
    assert sorted(taken[0] + taken[1]) == list(range(USUAL.partitions))


def _taken(of: Job, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(Loop, "_producer", lambda self, number: None)
    loop = Loop(of)
    loop._take_partitions()
    taken = [place.partition for place in loop.consumer.assignment()]
    loop.consumer.close()
    return taken
