"""Search for a run that goes wrong: a scenario under many seeds, each with its own delays, faults, crashes and moves.

A scenario is a function that uses a ``TestDriver`` as any test does. It is run once in calm; then again and again while
things go wrong around it, and every time what is committed must be the same as in calm.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from streams.errors import ConfigError
from streams.source.event_source import EventSource
from streams.testing.driver import TestDriver
from streams.testing.fault_search import FAULTS, Chaos, Fault, check_faults, conditions_of
from streams.testing.quiescence import contents_of

StoreT = TypeVar("StoreT")

SEED_VARIABLE: Final = "SEED"
"""Environment variable with the one seed that is to be run."""
PATIENCE: Final = 300.0
"""Simulated seconds: faults may cost some sessions and timeouts."""
_SHOWN: Final = 600


class SearchFailed(AssertionError):
    """A run went wrong. ``seed`` makes it happen again: ``SEED=<seed>`` runs that one alone."""

    def __init__(self, seed: int, text: str) -> None:
        super().__init__(text)
        self.seed = seed


class SearchReport(msgspec.Struct, frozen=True):
    """Report of a search that found nothing: its seeds, and how often each fault struck."""

    seeds: tuple[int, ...]
    happened: Mapping[str, int]


class _Outcome(NamedTuple):
    """Committed results of one run, in a form that does not depend on the order of partitions in time."""

    outputs: dict[str, dict[bytes | None, list[Any]]]
    dead_letters: dict[int, list[Any]]
    state: dict[int, Any]


class _SearchRun(NamedTuple):
    """``wrong``: what went wrong, empty if nothing did. ``happened``: which faults."""

    wrong: str
    outcome: _Outcome | None
    happened: Counter[str]
    trace: list[str]


def search(
    source: EventSource[StoreT] | Callable[[], EventSource[StoreT]],
    scenario: Callable[[TestDriver[StoreT]], object],
    *,
    seeds: int | Iterable[int] = 100,
    members: int = 2,
    faults: Collection[Fault] = FAULTS,
    invariant: Callable[[TestDriver[StoreT]], object] | None = None,
    compare: bool = True,
    ordered: bool = True,
    ignore_topics: Collection[str] = (),
    topics: Mapping[str, int] | None = None,
    patience: float = PATIENCE,
) -> SearchReport:
    """Run ``scenario(driver)`` under many seeds. Raises ``SearchFailed`` for the first one that goes wrong.

    A run goes wrong when the scenario, or ``invariant(driver)`` after it, raises; when ``TestDriver.check`` finds
    something; and, with ``compare``, when what is committed differs from a run without faults: the outputs of each key
    in their order (``ordered=False``: in any, for keys that several partitions write to), the dead letters, and the
    state of each partition. Leave out what depends on time by ``ignore_topics``, or ``compare=False``.

    ``seeds`` is a number of seeds, or the seeds; the variable ``SEED`` chooses a single one. ``faults`` is what may go
    wrong. What the scenario raises in the run without faults is raised as it is.
    A seed costs about 0.1 s of a processor for a scenario of 40 events.
    """
    check_faults(faults)
    chosen = _seeds(seeds)

    def run(seed: int | None) -> _SearchRun:
        driven: dict[str, Any] = {"members": members, "topics": topics or {}, "patience": patience}
        if seed is None:
            with TestDriver(source, **driven) as driver:
                scenario(driver)
                driver.settle()
                driver.check()
                if invariant is not None:
                    invariant(driver)
                return _SearchRun("", _outcome(driver), Counter(), driver.trace)
        with TestDriver(source, seed=seed, conditions=conditions_of(seed), start=False, **driven) as driver:
            chaos = Chaos(driver, seed, faults)
            try:
                driver.start()
                scenario(driver)
                chaos.stop()
                driver.start()
                driver.check()
                if invariant is not None:
                    invariant(driver)
            except Exception as error:
                return _SearchRun(f"{type(error).__name__}: {error}", None, chaos.happened, driver.trace)
            return _SearchRun("", _outcome(driver), chaos.happened, driver.trace)

    calm = run(None)
    happened: Counter[str] = Counter()
    for seed in chosen:
        found = run(seed)
        wrong = found.wrong or (_difference(calm, found, ordered, ignore_topics) if compare else "")
        if wrong:
            again = run(seed)
            same = again.trace == found.trace and again.wrong == found.wrong and again.outcome == found.outcome
            raise SearchFailed(seed, _message(seed, wrong, found, same=same))
        happened += found.happened
    return SearchReport(tuple(chosen), dict(sorted(happened.items())))


def _seeds(seeds: int | Iterable[int]) -> list[int]:
    named = os.environ.get(SEED_VARIABLE, "").strip()
    if named:
        try:
            return [int(named)]
        except ValueError:
            raise ConfigError(f"{SEED_VARIABLE} is {named!r}; it must be a whole number") from None
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not chosen:
        raise ConfigError("there is no seed to run: seeds must be 1 or more")
    return chosen


def _outcome(driver: TestDriver[Any]) -> _Outcome:
    config = driver._world.config
    inside = {config.topic, config.changelog, config.dead_letters, *config.own_inputs}
    outputs: dict[str, dict[bytes | None, list[Any]]] = {}
    for topic in sorted({topic for topic, _ in driver._world.broker.logs} - inside):
        by_key = outputs[topic] = defaultdict(list)
        for record in driver.outputs(topic):
            by_key[record.key].append((record.value, record.headers or []))
    dead: dict[int, list[Any]] = defaultdict(list)
    for record in driver.dead_letters():
        dead[record.partition].append((record.key, record.value))
    state = {
        number: contents_of(driver.restored_store(number)) or driver.changelog(number)
        for number in range(config.num_partitions)
    }
    return _Outcome(outputs, dead, state)


def _difference(calm: _SearchRun, found: _SearchRun, ordered: bool, ignored: Collection[str]) -> str:
    """Describe the difference of committed results from those of the calm run; empty if there is none."""
    before, after = calm.outcome, found.outcome
    assert before is not None
    assert after is not None
    for topic in sorted(before.outputs.keys() | after.outputs.keys()):
        if topic in ignored:
            continue
        expected, seen = before.outputs.get(topic, {}), after.outputs.get(topic, {})
        for key in sorted(expected.keys() | seen.keys(), key=lambda key: key or b""):
            one, other = expected.get(key, []), seen.get(key, [])
            if key is None or not ordered:
                one, other = sorted(one, key=repr), sorted(other, key=repr)
            if one != other:
                return f"{topic}, key {key!r}: {_first_difference(one, other, ordered)}"
    for number in sorted(before.dead_letters.keys() | after.dead_letters.keys()):
        one, other = before.dead_letters.get(number, []), after.dead_letters.get(number, [])
        if one != other:
            return f"dead letters of partition {number}: {_first_difference(one, other, True)}"
    for number, expected_state in before.state.items():
        if after.state[number] != expected_state:
            return f"the state of partition {number}: {_cut(expected_state)} in calm, here {_cut(after.state[number])}"
    return ""


def _first_difference(one: list[Any], other: list[Any], ordered: bool) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    at = next((number for number, (left, right) in pairs if left != right), min(len(one), len(other)))
    advice = ""
    if ordered and sorted(one, key=repr) == sorted(other, key=repr):
        advice = "; the same in another order: if several partitions write to this key, use ordered=False"
    return (
        f"{len(one)} record(s) in calm, {len(other)} here; number {at} on: {_cut(one[at : at + 2])} in calm, here "
        f"{_cut(other[at : at + 2])}{advice}"
    )


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."


def _message(seed: int, wrong: str, found: _SearchRun, *, same: bool) -> str:
    faults = ", ".join(f"{count} x {name}" for name, count in found.happened.items()) or "none, only other delays"
    again = (
        "It goes exactly the same way when it is run again."
        if same
        else "It went another way when it was run again: something outside of the driver has an "
        "influence (a global, the real clock, uuid, a file, the order of a set)."
    )
    happened = "\n  ".join(found.trace[-30:])
    return (
        f"seed {seed} goes wrong (run it alone with {SEED_VARIABLE}={seed}): {wrong}\n{again}\n"
        f"faults: {faults}\nhappened:\n  {happened}"
    )
