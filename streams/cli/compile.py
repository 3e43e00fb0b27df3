"""``kes compile``: the hot path of this installation, compiled in place."""

from __future__ import annotations

import subprocess
import sys

import typer

from streams.cli.console import answers
from streams.errors import ConfigError
from streams.sak import compiling, leaves

app = typer.Typer()


@app.command("compile")
def compile_leaves() -> None:
    """Compile the functions that run once per event, in place, for this Python and the installed msgspec.

    Needs a C compiler, the headers of Python and the extra `compile`. Running processes are not affected; the next
    start uses the compiled code.

    Exit codes: 0 the hot path is compiled; 1 it is not; 2 wrong usage.
    """
    missing = compiling.missing_tool()
    if missing and leaves.summary() != leaves.COMPILED:
        needs = "a C compiler (apt install gcc python3-dev), and: pip install 'kafka-event-source[compile]'"
        raise ConfigError(f"the hot path cannot be compiled: {missing}; it takes {needs}")
    try:
        compiling.main()
    except OSError as error:
        raise ConfigError(f"the hot path cannot be compiled in {leaves.PACKAGE}: {error}") from error
    look = "from streams.sak import leaves; print(leaves.summary())"  # as the next process has it
    seen = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    answers().print(f"hot path: {seen.stdout.strip() or seen.stderr.strip()}", soft_wrap=True)
    if seen.stdout.strip() != leaves.COMPILED:
        raise typer.Exit(1)
