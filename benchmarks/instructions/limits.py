"""The limits of the cost of an event: counts that were written down on purpose, and the distance that is too far.

``python -m benchmarks.instructions --set-limits`` writes them down anew, in ``limits.json``; ``tests/unit/
test_speed_guard.py`` compares. The counts are those of Python 3.11; other versions execute other bytecodes for the same
source, fewer by the same part everywhere. Of compiled leaves no bytecode is counted: what is guarded there is that they
are compiled, and call no more of Python than they did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.instructions.child import ROOT, count
from benchmarks.instructions.counting import OUTERMOST
from benchmarks.instructions.stages import STAGES, total
from benchmarks.instructions.turns import TURNS

GUARDED: Final = (
    "engine",
    "batch",
    "scheduler",
    "scheduler-metrics",
    "concurrency",
    "compiled-engine",
    "compiled-two-inputs",
    "live",
)
EVENTS: Final = 500
"""That are counted, after as many that are not: what happens once per transaction weighs more than in a long run."""
MORE: Final = 0.04
"""So much more than what was written down is too much."""
LESS: Final = 0.10
"""So much less, and what was written down guards nothing any more."""
PARTS: Final = {(3, 11): 1.0, (3, 12): 0.92, (3, 13): 0.915}
"""Bytecodes for the same source, as part of those of Python 3.11: 0.913 to 0.923 and 0.909 to 0.917 were counted."""
KINDS: Final = {"bytecodes": "bytecodes", "calls": "calls of Python functions", "c_calls": "calls of functions of C"}
FILE: Final = Path(__file__).with_name("limits.json")
ANEW: Final = "python -m benchmarks.instructions --set-limits"

Stages = dict[str, float]
Limits = dict[str, dict[str, Stages]]
"""By system and kind of count: what was written down of each stage. What live traffic makes the loop do has one."""


def counted(system: str, folder: Path = ROOT) -> dict[str, Stages]:
    """Count per event, as limits have it. Raises ``Failed``."""
    found, part = count(folder, system, EVENTS, EVENTS), PARTS.get(sys.version_info[:2])
    turns = {kind: {OUTERMOST: round(number, 2)} for kind, number in found.turns.items()}
    return turns | {
        kind: {
            stage: round(getattr(found, kind)[stage] / (part or 1.0 if kind == "bytecodes" else 1.0), 2)
            for stage in STAGES
        }
        for kind in KINDS
        if kind != "bytecodes" or part
    }


def known() -> Limits:
    """Read the limits."""
    return msgspec.json.decode(FILE.read_bytes(), type=Limits)


def set_anew() -> None:
    """Write down the present counts."""
    limits = {system: counted(system) for system in GUARDED}
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(limits), indent=1) + b"\n")


def too_much(found: Mapping[str, Stages], limits: Mapping[str, Stages]) -> list[str]:
    """Describe the counts that are above their limits, and the stages that made them so."""
    return _outside(found, limits, f"at most {MORE:.0%} more", lambda ratio: ratio > 1 + MORE)


def too_little(found: Mapping[str, Stages], limits: Mapping[str, Stages]) -> list[str]:
    """Describe the counts that are so far below their limits that these guard nothing."""
    return _outside(found, limits, f"{LESS:.0%} less guards nothing", lambda ratio: ratio < 1 - LESS)


def _outside(
    found: Mapping[str, Stages], limits: Mapping[str, Stages], rule: str, is_outside: Callable[[float], bool]
) -> list[str]:
    return [
        _told(kind, stages, limits[kind], rule)
        for kind, stages in found.items()
        if is_outside(_ratio(total(stages), total(limits[kind])))
    ]


def _ratio(now: float, before: float) -> float:
    return now / before if before else 1.0 + now


def _told(kind: str, found: Stages, limits: Stages, rule: str) -> str:
    changes = {stage: number - limits.get(stage, 0.0) for stage, number in found.items()}
    most = sorted(changes, key=lambda stage: -abs(changes[stage]))[:4]
    stages = ", ".join(
        f"{stage} {limits.get(stage, 0.0):.1f} -> {found[stage]:.1f}" for stage in most if abs(changes[stage]) > 0.05
    )
    before, now = total(limits), total(found)
    what = f"{KINDS[kind]} per event" if kind in KINDS else f"{TURNS[kind]}, per transaction"
    return f"{what}: {before:.1f} -> {now:.1f} ({_ratio(now, before) - 1:+.1%}; {rule}). {stages}"
