"""``kes demo``: the flights example of the checkout, from an empty machine to checked numbers."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

import streams
from streams.errors import ConfigError

app = typer.Typer()

_NEEDED = ("pyspark", "pyarrow", "pandas", "matplotlib")


@app.command()
def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for what stays: the plot, the log. Default: out/flights, or the next free."),
    ] = None,
    events: Annotated[
        int | None,
        typer.Option("--events", min=1, metavar="N", help="The first N flights only. Default: the whole year."),
    ] = None,
    kill: Annotated[bool, typer.Option("--kill/--no-kill", help="Kill one worker half way.")] = True,
    json: Annotated[bool, typer.Option("--json", help="The summary as one line of JSON on stdout.")] = False,
) -> None:
    """A year of real flights through Spark, Kafka and exactly-once handlers, checked to the last flight.

    Starts a Kafka of its own (fetched the first time, then offline), turns the data set into events with Spark, folds
    them in worker processes of which one is killed half way, and compares every number with what Spark computes from
    the file.

    Exit codes: 0 every number is right; 1 a number is off (the differences are shown), or a problem to be solved first;
    130 interrupted; 143 terminated.
    """
    root = Path(streams.__file__).resolve().parent.parent
    if not (root / "examples" / "flights" / "main.py").is_file():
        raise ConfigError(
            "the demo lives in the source checkout (examples/flights), which is not where this package is installed; "
            "clone the project and run: make demo"
        )
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ConfigError(f"`kes demo` needs {', '.join(missing)}: pip install 'kafka-event-source[demo]'")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    main = importlib.import_module("examples.flights.main")
    raise typer.Exit(main.run(main.Options(out=out, events=events, kill=kill, json=json)))
