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
    """One entry of the command list: the module that holds its ``app``, its line in the help, the extra it needs."""

    module: str
    help: str
    extra: str = ""


COMMANDS = {
    "new": Command("streams.cli.new", "Create a small project: an event source, a test, a producer."),
    "run": Command("streams.cli.run", "Run an event source in supervised worker processes."),
    "spark": Command("streams.cli.spark", "Run the streaming queries of a Spark pipeline under supervision.", "spark"),
    "broker": Command("streams.cli.broker", "Run a real Kafka broker on this machine: start, stop, status.", "broker"),
    "topics": Command("streams.cli.topics", "Manage the topics of an event source: plan, apply, grow."),
    "topology": Command("streams.cli.topology", "Show the inputs, handlers, stores and outputs of an event source."),
    "schema": Command(
        "streams.cli.schema", "Compare and register the schemas of events: plan, register, check, diff.", "registry"
    ),
    "offsets": Command(
        "streams.cli.offsets", "Set where a source begins, reset offsets that are ahead: start, accept."
    ),
    "lag": Command("streams.cli.lag", "Show the lag of each partition: committed offset, end, distance."),
    "group": Command("streams.cli.group", "Show the members of a group: owners, standbys and moves in progress."),
    "txn": Command("streams.cli.txn", "List open transactions, and end hanging ones: list, hanging, end, abort."),
    "compile": Command("streams.cli.compile", "Compile the hot path of this installation for more speed."),
    "config": Command("streams.cli.config", "Show the settings in effect and where each comes from."),
    "doctor": Command("streams.cli.doctor", "Diagnose a cluster and an event source, with the command that fixes it."),
    "tail": Command("streams.cli.tail", "Follow a topic: decoded committed records, filtered by time or key."),
    "state": Command("streams.cli.state", "Read, compare, repair and change the state of an event source."),
    "visit": Command(
        "streams.cli.visit", "Visit each key of an event source's store, show its progress, or cancel it."
    ),
    "view": Command("streams.cli.view", "Read a compacted topic, or a source's state, as a view: get, scan, watch."),
    "web": Command("streams.cli.web", "Show an event source, or any group, in the browser.", "web"),
    "dlq": Command("streams.cli.dlq", "Manage dead letters: list, show, replay, drop."),
    "parked": Command("streams.cli.parked", "Manage parked keys: list, show, retry, skip-head, drop."),
    "once": Command("streams.cli.once", "Show the ids that an event source remembers: stats."),
    "jobs": Command("streams.cli.jobs", "Manage durable jobs: list, show, retry, cancel."),
    "skip": Command("streams.cli.skip", "Skip a record that stops an event source, without a deployment."),
    "rebuild": Command("streams.cli.rebuild", "Build a source again beside the running one, muted: start, status."),
    "reset": Command("streams.cli.reset", "Set a stopped source to other places, with or without its state."),
    "outbox": Command(
        "streams.cli.outbox", "Relay rows of PostgreSQL to Kafka exactly once: apply, relay, status.", "outbox"
    ),
    "journal": Command("streams.cli.journal", "Inspect the log of a journal: status, follow, trim, verify."),
    "verify": Command(
        "streams.cli.verify", "Kill and freeze an event source, and check that its results stay the same.", "broker"
    ),
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
            root.command(name, help=command.help)(_not_loaded)
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
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Log more. Twice: log everything.")] = 0,
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
