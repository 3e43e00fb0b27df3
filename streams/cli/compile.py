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
    """Compile the functions that run once per event, beside their source, for this Python and the msgspec that is
    installed. Needs a C compiler, Python's headers, and the extra compile. What runs now goes on as it is; the next
    start takes the compiled ones.

    Exit codes: 0 the hot path runs compiled; 1 it does not; 2 wrong usage.
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
