"""What callgrind wrote is read rightly: names that are told once, calls, and what was executed inside of them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.instructions.callgrind import Profile

WRITTEN = """\
# callgrind format
events: Ir

fn=(1) main
12 10
cfn=(2) decode'2
calls=3 0
14 300
cfn=(3) _PyObject_GC_Link
calls=4 0
15 40

fn=(2)
20 260
cfn=(3)
calls=1 0
21 10

totals: 350
"""


def test_calls_and_inclusive_costs_are_added_up_by_name(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_text(WRITTEN)
    found = Profile(file)
    assert found.total == 350
    assert found.calls == {"decode": 3, "_PyObject_GC_Link": 5}
    assert found.inclusive == {"decode": 300, "_PyObject_GC_Link": 50}
