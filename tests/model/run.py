"""Explore the protocol model by hand: larger configurations, single rules taken out, traces in words.

python tests/model/run.py                        the standard configurations, whole
python tests/model/run.py --deep --states 2000000   the larger ones, that many states of each
python tests/model/run.py --without S7_FENCE     one rule out, with its counterexample
python tests/model/run.py --rules                every rule out in turn, a table
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.configs import DEEP, MISSED_IN, MISSED_LATE, STANDARD
from model.rules import Model, Rule
from model.search import search

MISSED = {**MISSED_IN, **MISSED_LATE}


def main() -> int:
    """Exit code 1 when the whole protocol breaks, or a rule is not missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=10_000_000, help="at most this many states of each configuration")
    parser.add_argument("--deep", action="store_true", help="the larger configurations")
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument(
        "--without", choices=[rule.name for rule in MISSED], help="one rule out, in its own configuration"
    )
    parser.add_argument("--rules", action="store_true", help="every rule out in turn")
    asked = parser.parse_args()
    if asked.without:
        rule = Rule[asked.without]
        print(search(Model(MISSED[rule], frozenset({rule})), asked.states))
        return 0
    if asked.rules:
        return _rules(asked.states)
    broken = 0
    for config in DEEP if asked.deep else STANDARD:
        if asked.only in config.name:
            verdict = search(Model(config, frozenset()), asked.states)
            print(f"{config.name}: {verdict}", flush=True)
            broken |= bool(verdict.problem)
    return int(broken)


def _rules(states: int) -> int:
    unmissed = 0
    for rule in MISSED:
        verdict = search(Model(MISSED[rule], frozenset({rule})), states)
        unmissed += not verdict.problem
        told = f"{len(verdict.trace)} steps: {verdict.problem}" if verdict.problem else "NOT MISSED"
        print(
            f"{rule.name:28} {rule.value[0]:6} {verdict.states:7} states {verdict.seconds:5.1f} s  {told}", flush=True
        )
    return int(unmissed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
