"""Explore the model of the Spark sink by hand: larger worlds, single rules taken out, traces in words.

python tests/model/spark_run.py                      the standard worlds, whole
python tests/model/spark_run.py --deep --states 2000000   the larger ones, that many states of each
python tests/model/spark_run.py --without MARKER     one rule out, with its counterexample
python tests/model/spark_run.py --rules              every rule out in turn, a table
python tests/model/spark_run.py --holes              what no rule closes
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.spark_configs import DEEP, HOLES, MISSED_IN, MISSED_LATE, STANDARD
from model.spark_rules import Rule
from model.spark_search import model_of, search

MISSED = {**MISSED_IN, **MISSED_LATE}


def main() -> int:
    """Exit code 1 when the whole protocol breaks, or a rule is not missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=10_000_000, help="at most this many states of each world")
    parser.add_argument("--deep", action="store_true", help="the larger worlds")
    parser.add_argument("--only", default="", help="worlds whose name contains this")
    parser.add_argument("--without", choices=[rule.name for rule in MISSED], help="one rule out, in its own world")
    parser.add_argument("--rules", action="store_true", help="every rule out in turn")
    parser.add_argument("--holes", action="store_true", help="the worlds that break with all rules in")
    asked = parser.parse_args()
    if asked.without:
        rule = Rule[asked.without]
        print(search(model_of(MISSED[rule], {rule}), asked.states))
        return 0
    if asked.rules:
        return _rules(asked.states)
    broken = 0
    for config in HOLES if asked.holes else DEEP if asked.deep else STANDARD:
        if asked.only in config.name:
            verdict = search(model_of(config), asked.states)
            print(f"{config.name}: {verdict}", flush=True)
            broken |= bool(verdict.problem)
    return int(broken and not asked.holes)


def _rules(states: int) -> int:
    unmissed = 0
    for rule, config in MISSED.items():
        verdict = search(model_of(config, {rule}), states)
        unmissed += not verdict.problem
        told = f"{len(verdict.trace)} steps: {verdict.problem}" if verdict.problem else "NOT MISSED"
        print(f"{rule.name:24} {verdict.states:7} states {verdict.seconds:5.1f} s  {told}", flush=True)
    return int(unmissed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
