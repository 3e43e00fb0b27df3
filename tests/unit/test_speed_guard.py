"""Nobody makes an event more expensive without knowing: its bytecodes and calls are counted, not timed.

The counts are the same in every run and at any load (``benchmarks/instructions``), so a limit of a few percent does not
flake. What it does not see: C that gets slower, caches, waiting. For that there is ``make bench``.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest

from benchmarks.instructions.child import COMPILED, ROOT
from benchmarks.instructions.limits import ANEW, GUARDED, counted, known, too_little, too_much
from benchmarks.instructions.stages import FILES
from streams.sak import leaves

pytestmark = pytest.mark.timeout(300)  # seconds; a tenth of it on a machine that has nothing else to do

here = cache(counted)
"""What a system costs, counted once."""

HELP = f"""
Which function it is: python -m benchmarks.instructions {{system}} --functions 40 --against ../a-checkout-from-before
If it is worth that much, set the limits anew, and say in the commit what it is worth: {ANEW}
"""

SLOWER = """

def _slowed_down(forward):
    def forward_after_a_while(self, *args, **kwargs):
        for _ in range(3):
            _
        return forward(self, *args, **kwargs)

    return forward_after_a_while


EventContext.forward = _slowed_down(EventContext.forward)
"""
"""A function between, and three turns of a loop: what a careless change costs at least."""


@pytest.mark.parametrize("system", GUARDED)
def test_an_event_costs_no_more_than_is_known(system: str) -> None:
    if system.startswith(COMPILED) and leaves.summary() != leaves.COMPILED:
        pytest.skip(f"the leaves are not compiled: {leaves.summary()}")
    found, limits = here(system), known()[system]
    more, less = too_much(found, limits), too_little(found, limits)
    assert not more, "\n".join(["An event costs more than it did.", *more, HELP.format(system=system)])
    assert not less, "\n".join(["An event costs much less. Let it stay so:", *less, f"set the limits anew: {ANEW}"])


def test_the_guard_sees_one_more_function_on_the_way(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "streams", tmp_path / "streams", ignore=shutil.ignore_patterns("__pycache__"))
    again = counted("engine", tmp_path)
    # Nearly: on a busy machine a poll may be cut at another record, which a count per event shows in its second digit.
    alike = {kind: pytest.approx(stages, rel=1e-3, abs=0.1) for kind, stages in here("engine").items()}
    assert again == alike, "the same code costs the same"
    with (tmp_path / "streams/runtime/partition/event_context.py").open("a") as file:
        file.write(SLOWER)
    told = too_much(counted("engine", tmp_path), here("engine"))
    assert any(line.startswith("calls of Python functions per event") for line in told), told


def test_what_became_cheaper_by_much_is_told_as_well() -> None:
    limits = {"calls": {"slice": 10.0, "store": 10.0}}
    assert not too_little({"calls": {"slice": 8.2, "store": 10.0}}, limits)
    (told,) = too_little({"calls": {"slice": 7.9, "store": 10.0}}, limits)
    assert told.startswith("calls of Python functions per event: 20.0 -> 17.9 (-10.5%;")
    assert told.endswith("slice 10.0 -> 7.9")


def test_a_task_more_per_transaction_is_told() -> None:
    (told,) = too_much(
        {"tasks": {"loop": 1.0}, "timers": {"loop": 3.0}}, {"tasks": {"loop": 0.0}, "timers": {"loop": 3.0}}
    )
    assert told.startswith("tasks made, per transaction: 0.0 -> 1.0")


def test_each_file_with_a_stage_is_there() -> None:
    """A file that has moved would count for the stage of its caller, and the sum would not show it."""
    ours = [part for part in FILES if not part.startswith("/")]
    assert [part for part in ours if not list(ROOT.glob(f"{part.rstrip('/')}*"))] == []
