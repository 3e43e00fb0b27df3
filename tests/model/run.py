"""Explore the models by hand: larger configurations, single rules taken out, traces in words.

python tests/model/run.py                        the standard configurations of the protocol, whole
python tests/model/run.py --spark                those of the Spark sink (with any of the options below, too)
python tests/model/run.py --deep --states 2000000   the larger ones, that many states of each
python tests/model/run.py --without S7_FENCE     one rule out, with its counterexample
python tests/model/run.py --rules                every rule out in turn, a table
python tests/model/run.py --spark --holes        what no rule closes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.model import rules, spark_rules
from tests.model.actions import Protocol
from tests.model.search import Verdict, search
from tests.model.spark_driver import Sink

MODELS: dict[type, Any] = {rules.Config: Protocol, spark_rules.Config: Sink}


def searched(config: Any, without: Iterable[Any] = (), states: int = 10_000_000) -> Verdict:
    """The search of a configuration without these rules."""
    return search(MODELS[type(config)](config, frozenset(without)), states)


def world_of(rule: Any) -> Any:
    """Where a rule is missed."""
    return rule.value[-1]


def main() -> int:
    """Exit code 1 when the whole protocol breaks, or a rule is not missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spark", action="store_true", help="the Spark sink, not the protocol of commits and moves")
    parser.add_argument("--states", type=int, default=10_000_000, help="at most this many states of each configuration")
    parser.add_argument("--deep", action="store_true", help="the larger configurations")
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--without", default="", help="one rule out, in its own configuration")
    parser.add_argument("--rules", action="store_true", help="every rule out in turn")
    parser.add_argument("--holes", action="store_true", help="the configurations that break with all rules in")
    asked = parser.parse_args()
    of: Any = spark_rules if asked.spark else rules
    missed = {rule: world_of(rule) for rule in of.Rule if world_of(rule)}
    if asked.without:
        named = {rule.name: rule for rule in missed}
        if asked.without not in named:
            parser.error(f"--without takes one of {', '.join(named)}")
        rule = named[asked.without]
        print(searched(missed[rule], {rule}, asked.states))
        return 0
    if asked.rules:
        verdicts = {rule: searched(config, {rule}, asked.states) for rule, config in missed.items()}
        for rule, verdict in verdicts.items():
            told = f"{len(verdict.trace)} steps: {verdict.problem}" if verdict.problem else "NOT MISSED"
            print(f"{rule.name:28} {verdict.states:7} states {verdict.seconds:5.1f} s  {told}")
        return int(not all(verdict.problem for verdict in verdicts.values()))
    broken = False
    for config in of.HOLES if asked.holes else of.DEEP if asked.deep else of.STANDARD:
        if asked.only in config.name:
            verdict = searched(config, (), asked.states)
            print(f"{config.name}: {verdict}", flush=True)
            broken |= bool(verdict.problem)
    return int(broken and not asked.holes)


if __name__ == "__main__":
    raise SystemExit(main())
