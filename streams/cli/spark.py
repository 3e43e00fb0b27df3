"""``kes spark run module:pipeline``: streaming queries of Spark that are kept alive."""

from __future__ import annotations

from typing import Annotated

import pyspark
import typer

from streams.cli.logging_setup import LogFormat, LogLevel, LogOptions, configure_logging
from streams.cli.source_name import checked_name
from streams.errors import ConfigError
from streams.model.loading import load
from streams.sak import spark_jar
from streams.sak.restarts import RestartPolicy
from streams.spark.running.pipeline import Pipeline

app = typer.Typer(no_args_is_help=True)


@app.callback()
def spark() -> None:
    """Pipelines of Spark."""


@app.command()
def jar() -> None:
    """Print the path of kes-spark.jar, for the setting spark.jars of a platform: tasks that write encode in Java then.

    Exit codes: 0 printed; 1 this installation has none for its Spark.
    """
    if missing := spark_jar.problem(pyspark.__version__):
        raise ConfigError(f"tasks that write encode in Python: {missing}; {spark_jar.ADVICE}")
    typer.echo(spark_jar.JAR)


@app.command()
def run(
    pipeline: Annotated[
        str, typer.Argument(metavar="MODULE:PIPELINE", help="A streams.spark.Pipeline, or a function that returns one.")
    ],
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, max=86_400, help="Seconds to wait for the current batch of each query to finish.")
    ] = 60.0,
    max_crashes: Annotated[
        int, typer.Option(min=0, help="Failures of one query within the window before giving up.")
    ] = 5,
    window_seconds: Annotated[
        float, typer.Option(min=1.0, max=86_400, help="Length of the window in seconds.")
    ] = 600.0,
    metrics: Annotated[
        str, typer.Option(metavar="ADDRESS", help="HOST:PORT or PORT to serve /metrics (Prometheus), /live and /ready.")
    ] = "",
    log_level: Annotated[LogLevel, typer.Option(case_sensitive=False, help="Level of all loggers.")] = LogLevel.INFO,
    log_format: Annotated[LogFormat, typer.Option(help="Format of the log on standard error.")] = LogFormat.TEXT,
) -> None:
    """Run the streaming queries of a pipeline, and restart queries that fail.

    SIGINT, SIGTERM and SIGHUP stop each query after its current batch; a second signal stops it at once.

    Exit codes: 0 finished or stopped; 1 a problem to solve first (the message names it); 2 wrong usage; 70 a query
    failed too often.
    """
    configure_logging(LogOptions(log_level, log_format))
    found = load(checked_name(pipeline))
    if not isinstance(found, Pipeline):
        raise ConfigError(f"{pipeline!r} is {type(found).__name__}, not a streams.spark.Pipeline")
    policy = RestartPolicy(max_crashes=max_crashes, window_seconds=window_seconds)
    raise typer.Exit(found.run(metrics=metrics, policy=policy, drain_seconds=drain_seconds))
