"""The measures of this package."""

from __future__ import annotations

from benchmarks.sweeps.cost import CostMeasure
from benchmarks.sweeps.idle import IdleMeasure
from benchmarks.sweeps.live import LiveMeasure
from benchmarks.sweeps.workers import Workers

MEASURES = (CostMeasure(), LiveMeasure(), Workers(), IdleMeasure())
