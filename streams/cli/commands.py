"""The commands of ``kes``.

A command lives in its own module under ``streams.cli`` as a typer application called ``app`` and is imported only when
it is called: ``kes --help`` loads none of them. An application with one command and no callback of its own becomes a
plain command (``kes lag``), any other a group (``kes broker start``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, NamedTuple

import typer

from streams.errors import ConfigError

DISTRIBUTION = "kafka-event-source"


class Command(NamedTuple):
    """One entry of the command list: the module that holds its ``app``, its line in the help, the extra it needs.
    ``hidden``: a former name, which is not listed."""

    module: str
    help: str
    extra: str = ""
    hidden: bool = False


COMMANDS = {
    "demo": Command("streams.cli.demo", "Real flights through Spark, Kafka and exactly-once handlers.", "demo"),
    "new": Command("streams.cli.new", "A small project to begin with: event source, test, producer."),
    "run": Command("streams.cli.run", "Run an event source in worker processes that are kept alive."),
    "spark": Command("streams.cli.spark", "Pipelines of Spark: run, and keep alive.", "spark"),
    "broker": Command("streams.cli.broker", "An embedded real Kafka: start, stop, status.", "broker"),
    "topics": Command("streams.cli.topics", "Topics as the settings want them: plan, apply, grow."),
    "topology": Command("streams.cli.topology", "What an event source reads, handles, keeps and sends, as a graph."),
    "offsets": Command("streams.cli.offsets", "Offsets of a group that are ahead of its changelog: accept."),
    "lag": Command("streams.cli.lag", "Committed offset, end and distance of every partition."),
    "group": Command("streams.cli.group", "The members of a group, who has what, and what is on its way."),
    "txn": Command("streams.cli.transactions", "Open transactions: list, hanging, abort."),
    "transactions": Command("streams.cli.transactions", "The former name of txn.", hidden=True),
    "compile": Command("streams.cli.compile", "Compile the hot path of this installation, which is faster."),
    "config": Command("streams.cli.config", "The settings that are in effect, and where each comes from."),
    "doctor": Command("streams.cli.doctor", "What is wrong with a cluster and an event source, and what to type."),
    "tail": Command(
        "streams.cli.tail", "The committed records of a topic, decoded, from when on, by key, as they come."
    ),
    "state": Command("streams.cli.state", "The state of an event source: in its changelog, on disk, in snapshots."),
    "visit": Command("streams.cli.visit", "Visit each key of an event source's store: start, cancel, status."),
    "view": Command("streams.cli.view", "A compacted topic or a source's state, as a view: get, scan, watch."),
    "web": Command("streams.cli.web", "An event source, or any group, in the browser.", "web"),
    "dlq": Command("streams.cli.dlq", "Dead letters: list, show, replay (send again), drop."),
    "skip": Command("streams.cli.skip", "Pass a record that stops an event source, without a deployment."),
    "outbox": Command(
        "streams.cli.outbox", "Rows of PostgreSQL in Kafka exactly once: apply, relay, status.", "outbox"
    ),
    "journal": Command("streams.cli.journal", "The log of a journal: status, follow, trim, verify."),
    "verify": Command("streams.cli.verify", "Kill and freeze an event source, compare what it leaves.", "broker"),
}


def build(argv: Sequence[str]) -> typer.Typer:
    """The application for this command line: all commands are listed, the called one is loaded."""
    root = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    root.callback()(_root)
    wanted = called((*argv, *_words_to_complete()))
    for name, command in COMMANDS.items():
        if name == wanted:
            _add(root, name, command, _load(name, command))
        else:
            root.command(name, help=command.help, hidden=command.hidden)(_not_loaded)
    return root


def called(argv: Sequence[str]) -> str:
    """Return the name of the command in a command line, if there is one."""
    return next((word for word in argv if not word.startswith("-")), "")


def _words_to_complete() -> list[str]:
    """Return the words behind ``kes`` for which the shell wants completions, if that is why this process runs."""
    if "_KES_COMPLETE" not in os.environ:
        return []
    text = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")  # bash; the other shells
    return text.split()[1:]


def _load(name: str, command: Command) -> typer.Typer:
    """Import the command's module. A missing optional package is a setting to be made, not a crash."""
    try:
        app = import_module(command.module).app
    except ModuleNotFoundError as error:
        if not command.extra or (error.name or "").partition(".")[0] == "streams":
            raise
        raise ConfigError(
            f"`kes {name}` needs the package {error.name!r}: pip install '{DISTRIBUTION}[{command.extra}]'"
        ) from error
    assert isinstance(app, typer.Typer), f"{command.module}.app"
    return app


def _add(root: typer.Typer, name: str, command: Command, app: typer.Typer) -> None:
    single = len(app.registered_commands) == 1 and not app.registered_groups and app.registered_callback is None
    only = app.registered_commands[0] if single else None
    if only is None or only.callback is None:
        root.add_typer(app, name=name, help=command.help)
    else:
        root.command(
            name, help=only.help, context_settings=only.context_settings, no_args_is_help=only.no_args_is_help
        )(only.callback)


def _not_loaded() -> None:  # stands in the list of commands for one that is not called
    raise AssertionError("a command that was not loaded was called")


def _show_version(wanted: bool) -> None:
    if wanted:
        from streams.sak import leaves

        try:
            found = version(DISTRIBUTION)
        except PackageNotFoundError:
            found = "(not installed)"
        typer.echo(f"{DISTRIBUTION} {found}, hot path: {leaves.advised()}")
        raise typer.Exit


def _root(
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Log more; twice: everything.")] = 0,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Exactly-once event sourcing for Kafka.

    Settings come from the code, from variables (KES_BOOTSTRAP_SERVERS, KES_RUN_WORKERS) and from kes.toml: see kes
    config. Other variables: KES_CACHE_DIR, KES_DEBUG=1 (stack traces), KES_PLAIN=1 (nothing compiled).
    """
    from streams.cli.logging_setup import configure_logging, verbose_options

    configure_logging(verbose_options(verbose))
