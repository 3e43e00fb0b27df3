"""The root of ``kes``: what happens when a command fails.

Exit codes of every command: 0 done; 1 a problem whose message says how to solve it; 2 wrong usage; 70 a fault of ours
(or, of ``kes run``, a worker that cannot be kept alive); 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import typer

from streams.cli.commands import build, called
from streams.cli.failures import NO_ROOM, escape_unknown_characters, innermost, leave
from streams.cli.interrupts import EXIT_INTERRUPTED, ends_at_once
from streams.errors import StreamsError

EXIT_PROBLEM = 1
EXIT_USAGE = 2
EXIT_FAULT = 70
_WITHIN_PARAGRAPH = re.compile(r"(?<!\n)\n(?!\n)")


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
    if called(argv) != "run":  # whose log says it
        from streams.cli.console import complain
        from streams.cli.outside_options import unknown_variables

        for text in unknown_variables(command):
            complain(text)
    if TABLE in sources.tables:
        from streams.cli.outside_options import checked_options

        defaults = checked_options(sources, command)
    try:
        command(args=list(argv), prog_name="kes", auto_envvar_prefix=PREFIX.rstrip("_"), default_map=defaults)
    except SystemExit as exit_:
        if exit_.code == EXIT_USAGE:
            from streams.cli.outside_options import locations_of

            if locations := locations_of(sources, called(argv)):
                from streams.cli.console import complain

                complain(f"options of this command are also set in {', '.join(locations)}")
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


def report(error: BaseException) -> int:
    """Write error and remedy to stderr; return the exit code. ``KES_DEBUG=1`` adds the stack trace."""
    from streams.cli.console import complain

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
