"""The search of ``search.py`` over the sink's worlds."""

from __future__ import annotations

from collections.abc import Iterable

from . import spark_actions, spark_lanes, spark_state
from .search import Verdict, explore
from .spark_rules import Config, LaneConfig, LaneModel, Model, Rule
from .spark_state import GONE


def model_of(config: Config | LaneConfig, out: Iterable[Rule] = ()) -> Model | LaneModel:
    """``config`` without the rules ``out``."""
    if isinstance(config, LaneConfig):
        return LaneModel(config, frozenset(out))
    return Model(config, frozenset(out))


def search(model: Model | LaneModel, limit: int = 10_000_000) -> Verdict:
    """Explore at most ``limit`` states of ``model``, in the order of their distance from the start."""
    if isinstance(model, LaneModel):
        return explore(
            spark_lanes.initial(model),
            successors=lambda world: spark_lanes.successors(world, model),
            done=lambda world: spark_lanes.done(world, model),
            stalled=lambda world: "",
            describe=spark_lanes.describe,
            limit=limit,
        )
    return explore(
        spark_state.initial(model),
        successors=lambda world: spark_actions.successors(world, model),
        done=lambda world: spark_actions.done(world, model),
        stalled=_stalled,
        describe=spark_actions.describe,
        limit=limit,
    )


def _stalled(world: spark_state.World) -> str:
    if any(driver.at != GONE for driver in world.drivers):
        return "stalled: a driver is in its commit, and nothing leads on"
    return ""
