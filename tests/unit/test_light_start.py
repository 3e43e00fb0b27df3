"""What a program does not use is not loaded: each program runs in a process of its own, and lists its modules.

Figures of the time are those of ``python -m benchmarks.starting``; a test of them would measure the machine.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

CLIENTS: Final = ("confluent_kafka", "kafka", "streams.kafka")
EXTRAS: Final = ("psycopg", "pyarrow", "pandas", "pyspark", "typer", "rich", "prometheus_client", "opentelemetry")
ENGINE: Final = (
    "streams.runtime.engine",
    "streams.runtime.connections",
    "streams.runtime.member",
    "streams.runtime.keeping.keeper",
    "streams.runtime.ownership",
    "streams.runtime.partition.worker",
    "streams.runtime.transactions",
    "streams.core.assignor",
    "streams.core.claims",
    "streams.core.recovery",
)

DECLARED = """
from dataclasses import dataclass
from streams import EventContext, EventSource, EventSourceConfig, Table, event_type

@event_type("added", version=1)
@dataclass
class Added:
    number: int

source = EventSource(EventSourceConfig(group_id="g", topic="t", num_partitions=1), Table.factory(key=str, value=int))
rates = source.lookup("rates", key=str, value=float)

@source.on
def added(ctx: EventContext[Table[str, int]], event: Added) -> None: ...

assert source.topology.handlers
"""

HELP = """
import contextlib, io, sys
from streams.__main__ import run
sys.argv = ["kes", "--help"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    run()
"""

PROGRAMS: Final = {
    "the package": ("import streams", ("streams.errors", "asyncio", "msgspec")),
    "an event and its record": ("from streams import Record, event_type", ("asyncio", "streams.runtime", *CLIENTS)),
    "settings": ("from streams import EventSourceConfig", ("asyncio", "streams.runtime", *CLIENTS)),
    "an event source, declared": (DECLARED, ("stamina", "anyio.to_process", *ENGINE, *CLIENTS, *EXTRAS)),
    "a view": (
        "from streams import View; View('t', key=str, value=int)",
        ("streams.source", "streams.runtime.partition", "streams.core.transaction", *ENGINE, *CLIENTS, *EXTRAS),
    ),
    "a task of Spark": (
        "import streams.spark.reading.reader, streams.spark.writing.sink",
        ("kafka", "anyio", "streams.source", "streams.runtime", "streams.core", "streams.stores", "streams.views"),
    ),
    "kes --help": (HELP, ("asyncio", "anyio", "streams.source", "streams.runtime", "streams.views", *CLIENTS)),
}


def loaded_by(program: str) -> set[str]:
    """The modules of a process that ran this."""
    listing = f"{program}\nimport sys\nprint('\\n'.join(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True, timeout=60)
    return set(ran.stdout.split())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_loads_only_what_it_uses(name: str) -> None:
    program, absent = PROGRAMS[name]
    loaded = loaded_by(program)
    assert "streams" in loaded
    assert [module for module in sorted(loaded) for other in absent if f"{module}.".startswith(f"{other}.")] == []


def test_the_names_of_a_first_program_load_no_engine_and_no_client() -> None:
    loaded = loaded_by("import streams\nfor name in streams.__all__: getattr(streams, name)")
    absent = ("stamina", *ENGINE, *CLIENTS, *EXTRAS)
    assert "streams.source.event_source" in loaded
    assert [module for module in sorted(loaded) for other in absent if f"{module}.".startswith(f"{other}.")] == []
