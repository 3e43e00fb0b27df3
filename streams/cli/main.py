"""The root of ``kes``: which commands there are, and what happens when one of them fails.

A command lives in its own module under ``streams.cli`` as a typer application called ``app`` and is imported only when
it is called: ``kes --help`` loads none of them. An application with one command and no callback of its own becomes a
plain command (``kes lag``), any other a group (``kes broker start``).

Exit codes of every command: 0 done; 1 a problem whose message says how to solve it; 2 wrong usage; 70 a fault of ours
(or, of ``kes run``, a worker that cannot be kept alive); 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from streams.cli.failures import NO_ROOM, escape_unknown_characters, innermost, leave
from streams.cli.interrupts import EXIT_INTERRUPTED, ends_at_once
from streams.errors import ConfigError, StreamsError

EXIT_PROBLEM = 1
EXIT_USAGE = 2
EXIT_FAULT = 70
DISTRIBUTION = "kafka-event-source"
_WITHIN_PARAGRAPH = re.compile(r"(?<!\n)\n(?!\n)")


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
    "offsets": Command("streams.cli.offsets", "Reset group offsets that are ahead of the changelog: accept."),
    "lag": Command("streams.cli.lag", "Show the lag of each partition: committed offset, end, distance."),
    "group": Command("streams.cli.group", "Show the members of a group: owners, standbys and moves in progress."),
    "txn": Command(
        "streams.cli.transactions", "List open transactions, and end hanging ones: list, hanging, end, abort."
    ),
    "compile": Command("streams.cli.compile", "Compile the hot path of this installation for more speed."),
    "config": Command("streams.cli.config", "Show the settings in effect and where each comes from."),
    "doctor": Command("streams.cli.doctor", "Diagnose a cluster and an event source, with the command that fixes it."),
    "tail": Command("streams.cli.tail", "Follow a topic: decoded committed records, filtered by time or key."),
    "state": Command("streams.cli.state", "Read, compare, repair and change the state of an event source."),
    "visit": Command("streams.cli.visit", "Visit each key of an event source's store: start, cancel, status."),
    "view": Command("streams.cli.view", "Read a compacted topic, or a source's state, as a view: get, scan, watch."),
    "web": Command("streams.cli.web", "Show an event source, or any group, in the browser.", "web"),
    "dlq": Command("streams.cli.dlq", "Manage dead letters: list, show, replay, drop."),
    "skip": Command("streams.cli.skip", "Skip a record that stops an event source, without a deployment."),
    "outbox": Command(
        "streams.cli.outbox", "Relay rows of PostgreSQL to Kafka exactly once: apply, relay, status.", "outbox"
    ),
    "journal": Command("streams.cli.journal", "Inspect the log of a journal: status, follow, trim, verify."),
    "verify": Command(
        "streams.cli.verify", "Kill and freeze an event source, and check that its results stay the same.", "broker"
    ),
}


def run() -> NoReturn:
    """Entry point of the script ``kes``: run the command of this process, exit with its code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller; a socket must not get its number
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        escape_unknown_characters(getattr(sys, name))
    leave(main(sys.argv[1:]), when_unwritten=EXIT_PROBLEM)


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Every failure has become a message on stderr by then."""
    try:
        with ends_at_once():
            application = build(argv)
        _run(application, argv)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, SystemError) and isinstance(error.__cause__, KeyboardInterrupt | SystemExit):
            return EXIT_INTERRUPTED  # Ctrl-C, or SIGTERM where a command takes it, within a call of a C client
        return report(innermost(error))
    return 0


def _run(application: typer.Typer, argv: Sequence[str]) -> None:
    """Run the command. An option that is not given comes from the environment (``KES_RUN_WORKERS``), then from the file
    ``kes.toml`` (``[commands.run]``, ``workers = 2``)."""
    from streams.settings.sources import COMMANDS as TABLE
    from streams.settings.sources import PREFIX, SettingsSources

    command = typer.main.get_command(application)
    _prepare_help(command)
    if _only_explains(argv):
        command(args=list(argv), prog_name="kes")
    sources, defaults = SettingsSources(), {}
    if _called(argv) != "run":  # whose log says it
        from streams.cli.outside_options import unknown_variables
        from streams.looks.console import complain

        for text in unknown_variables(command):
            complain(text)
    if TABLE in sources.tables:
        from streams.cli.outside_options import checked_options

        defaults = checked_options(sources, command)
    try:
        command(args=list(argv), prog_name="kes", auto_envvar_prefix=PREFIX.rstrip("_"), default_map=defaults)
    except SystemExit as exit_:
        if exit_.code == EXIT_USAGE:
            from streams.cli.outside_options import places_of

            if places := places_of(sources, _called(argv)):
                from streams.looks.console import complain

                complain(f"options of this command are also set in {', '.join(places)}")
        raise


_EXPLAINING = frozenset({"--help", "--version", "--show-completion", "--install-completion"})


def _only_explains(argv: Sequence[str]) -> bool:
    """Check for help, the version or completions, which must work beside a ``kes.toml`` that is broken."""
    return not argv or not _EXPLAINING.isdisjoint(argv) or "_KES_COMPLETE" in os.environ


def _prepare_help(command: Any) -> None:
    """Keep the names of all variables out of the help, where one rule gives them, and join the lines of a paragraph:
    they are as long as those of the source, and a terminal may be narrower."""
    command.help = command.help and _WITHIN_PARAGRAPH.sub(" ", command.help)
    for parameter in command.params:
        parameter.show_envvar = False
    for below in getattr(command, "commands", {}).values():
        _prepare_help(below)


def build(argv: Sequence[str]) -> typer.Typer:
    """The application for this command line: all commands are listed, the called one is loaded."""
    root = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    root.callback()(_root)
    called = _called((*argv, *_words_to_complete()))
    for name, command in COMMANDS.items():
        if name == called:
            _add(root, name, command, _load(name, command))
        else:
            root.command(name, help=command.help)(_not_loaded)
    return root


def _called(argv: Sequence[str]) -> str:
    """Return the name of the command in a command line, if there is one."""
    return next((word for word in argv if not word.startswith("-")), "")


def _words_to_complete() -> list[str]:
    """Return the words behind ``kes`` for which the shell wants completions, if that is why this process runs."""
    if "_KES_COMPLETE" not in os.environ:
        return []
    text = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")  # bash; the other shells
    return text.split()[1:]


def report(error: BaseException) -> int:
    """Write error and remedy to stderr; return the exit code. ``KES_DEBUG=1`` adds the stack trace."""
    from streams.looks.console import complain

    if os.environ.get("KES_DEBUG") == "1":
        import traceback

        with suppress(OSError):  # as in ``complain``
            traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, StreamsError):
        complain(f"{_kind(error)}: {error}")
        return EXIT_PROBLEM
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        complain(f"{error.filename or 'the output'} cannot be written: {error.strerror}; make room, or write elsewhere")
        return EXIT_PROBLEM
    complain(
        f"unexpected {type(error).__name__}: {error}",
        hint="This should not happen. KES_DEBUG=1 shows where it comes from.",
    )
    return EXIT_FAULT


def _kind(error: StreamsError) -> str:
    """Name the kind of an error, ``broker unavailable`` for ``BrokerUnavailable``: by it users know who has to act."""
    name = type(error).__name__.removesuffix("Error")
    return "".join(" " + letter.lower() if letter.isupper() else letter for letter in name).strip() + (
        " error" if type(error).__name__.endswith("Error") else ""
    )


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
