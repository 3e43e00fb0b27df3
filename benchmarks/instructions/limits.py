"""What an event may cost: the counts that were written down on purpose, and how far from them is too far.

``python -m benchmarks.instructions --set-limits`` writes them down anew, in ``limits.json``; ``tests/unit/
test_speed_guard.py`` compares. The counts are those of Python 3.11; other versions execute other bytecodes for the same
source, fewer by the same part everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.instructions.child import ROOT, Counted, count
from benchmarks.instructions.stages import STAGES, total

GUARDED: Final = ("engine", "batch", "scheduler", "concurrency")
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
"""By system and kind of count: what was written down of each stage."""


def counted(system: str, folder: Path = ROOT) -> dict[str, Stages]:
    """Per event, as limits have it. Raises ``child.ChildFailed``."""
    found = count(folder, system, EVENTS, EVENTS)
    return {kind: _of_version(kind, found) for kind in KINDS if kind != "bytecodes" or version() in PARTS}


def version() -> tuple[int, int]:
    """Of this Python."""
    return sys.version_info[:2]


def _of_version(kind: str, found: Counted) -> Stages:
    part = PARTS[version()] if kind == "bytecodes" else 1.0
    stages: Mapping[str, float] = getattr(found, kind)
    return {stage: round(stages[stage] / part, 2) for stage in STAGES}


def known() -> Limits:
    """What was written down."""
    return msgspec.json.decode(FILE.read_bytes(), type=Limits)


def set_anew() -> None:
    """Write down what is counted now."""
    limits = {system: counted(system) for system in GUARDED}
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(limits), indent=1) + b"\n")


def too_much(found: Mapping[str, Stages], limits: Mapping[str, Stages]) -> list[str]:
    """What costs more than it may, and which stages made it so."""
    return [
        _told(kind, stages, limits[kind], f"at most {MORE:.0%} more")
        for kind, stages in found.items()
        if total(stages) > total(limits[kind]) * (1 + MORE)
    ]


def too_little(found: Mapping[str, Stages], limits: Mapping[str, Stages]) -> list[str]:
    """What costs so much less that its limit is none."""
    return [
        _told(kind, stages, limits[kind], f"{LESS:.0%} less guards nothing")
        for kind, stages in found.items()
        if total(stages) < total(limits[kind]) * (1 - LESS)
    ]


def _told(kind: str, found: Stages, limits: Stages, rule: str) -> str:
    changes = {stage: number - limits.get(stage, 0.0) for stage, number in found.items()}
    most = sorted(changes, key=lambda stage: -abs(changes[stage]))[:4]
    stages = ", ".join(
        f"{stage} {limits.get(stage, 0.0):.1f} -> {found[stage]:.1f}" for stage in most if abs(changes[stage]) > 0.05
    )
    before, now = total(limits), total(found)
    return f"{KINDS[kind]} per event: {before:.1f} -> {now:.1f} ({now / before - 1:+.1%}; {rule}). {stages}"
