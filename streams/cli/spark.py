"""``kes spark run module:pipeline``: streaming queries of Spark that are kept alive."""

from __future__ import annotations

from typing import Annotated

import typer

from streams.cli.logging_setup import LogFormat, LogLevel, LogOptions, configure_logging
from streams.cli.source_name import checked_name
from streams.errors import ConfigError
from streams.model.loading import load
from streams.sak.restarts import RestartPolicy
from streams.spark.running.pipeline import Pipeline

app = typer.Typer(no_args_is_help=True)


@app.callback()
def spark() -> None:
    """Pipelines of Spark."""


@app.command()
def run(
    pipeline: Annotated[
        str, typer.Argument(metavar="MODULE:PIPELINE", help="A streams.spark.Pipeline, or a function making one.")
    ],
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, max=86_400, help="Patience with the batch of a query that is to stop.")
    ] = 60.0,
    max_crashes: Annotated[int, typer.Option(min=0, help="Failures of one query in the window before giving up.")] = 5,
    window_seconds: Annotated[float, typer.Option(min=1.0, max=86_400, help="Length of that window.")] = 600.0,
    metrics: Annotated[
        str, typer.Option(metavar="ADDRESS", help="HOST:PORT or PORT for Prometheus (/metrics), /live and /ready.")
    ] = "",
    log_level: Annotated[LogLevel, typer.Option(case_sensitive=False, help="Of all loggers.")] = LogLevel.INFO,
    log_format: Annotated[LogFormat, typer.Option(help="Of the lines on standard error.")] = LogFormat.TEXT,
) -> None:
    """Run the streaming queries of a pipeline; start them again when they fail.

    SIGINT, SIGTERM and SIGHUP stop each query after its batch; a second signal at once.

    A Python worker keeps the connections of 16 partitions. Queries that read more for each core of the executors
    connect anew in each micro-batch, which is slow; a worker says so in its log.

    Exit codes: 0 finished or stopped; 1 a problem to be solved first (the message says which); 2 wrong usage;
    70 a query failed too often.
    """
    configure_logging(LogOptions(log_level, log_format))
    found = load(checked_name(pipeline))
    if not isinstance(found, Pipeline):
        raise ConfigError(f"{pipeline!r} is {type(found).__name__}, which is no streams.spark.Pipeline")
    policy = RestartPolicy(max_crashes=max_crashes, window_seconds=window_seconds)
    raise typer.Exit(found.run(metrics=metrics, policy=policy, drain_seconds=drain_seconds))
