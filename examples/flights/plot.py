"""The picture: how late flights leave, by hour of the day and airline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

FEWEST_FLIGHTS = 20
"""Cells with fewer flights say nothing and stay empty."""
FEWEST_CELLS = 3
"""Airlines with fewer cells are left out (unless all have fewer: a very small run)."""
EARLIEST, LATEST = -5, 45
"""Minutes at both ends of the colours."""


def draw(hours: Mapping[tuple[str, int], tuple[int, int]], names: Mapping[str, str], target: Path) -> None:
    """Write a PNG of mean delays. ``hours``: (airline, hour) to (flights, minutes of delay), early ones negative."""
    filled = Counter(airline for (airline, _), (flights, _) in hours.items() if flights >= FEWEST_FLIGHTS)
    shown = {airline for airline in filled if filled[airline] >= FEWEST_CELLS} or {airline for airline, _ in hours}
    airlines = sorted(shown, key=lambda each: -_mean(hours, each))
    columns = sorted({hour for _, hour in hours})
    cells = np.full((len(airlines), len(columns)), np.nan)
    for (airline, hour), (flights, minutes) in hours.items():
        if flights >= FEWEST_FLIGHTS and airline in airlines:
            cells[airlines.index(airline), columns.index(hour)] = minutes / flights
    # A figure of its own, without pyplot: no window, no state, no display needed.
    figure = Figure(figsize=(11, 1.8 + 0.36 * len(airlines)), layout="constrained")
    axes = figure.add_subplot()
    colours = mpl.colormaps["cividis"].copy()  # the same to colour-blind eyes, and in grey
    colours.set_bad("0.94")
    image = axes.imshow(np.ma.masked_invalid(cells), aspect="auto", cmap=colours, vmin=EARLIEST, vmax=LATEST)
    axes.set_xticks(range(len(columns)), [f"{hour:02d}" for hour in columns])
    axes.set_yticks(range(len(airlines)), [short(names.get(airline, airline)) for airline in airlines])
    axes.set_xlabel(f"scheduled hour of departure (New York); light grey: fewer than {FEWEST_FLIGHTS} flights")
    axes.set_title("Minutes late at departure, by hour and airline (New York, 2013)")
    for row, column in np.argwhere(~np.isnan(cells)):
        ink = "white" if cells[row, column] < (EARLIEST + LATEST) / 2 else "black"
        axes.text(column, row, f"{round(cells[row, column])}", ha="center", va="center", fontsize=7, color=ink)
    figure.colorbar(image, ax=axes, label="mean of actual minus scheduled, minutes", extend="both")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120, format="png")


def short(name: str) -> str:
    """An airline's name without the form of the company: ``Delta Air Lines Inc.`` is ``Delta Air Lines``."""
    return re.sub(r",? (Inc|Co|Corp|Corporation)\.?$", "", name)


def _mean(hours: Mapping[tuple[str, int], tuple[int, int]], airline: str) -> float:
    own = [value for (name, _), value in hours.items() if name == airline]
    return sum(minutes for _, minutes in own) / max(1, sum(flights for flights, _ in own))
