"""What a program does not use is not loaded: each program runs in a process of its own, and lists its modules.

Figures of the time are those of ``python -m benchmarks.starting``; a test of them would measure the machine.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import streams

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
    "the member of a group": ("import streams.kafka.group.connect", ("confluent_kafka", "kafka", *EXTRAS)),
    "an event and its record": ("from streams import Record, event_type", ("asyncio", "streams.runtime", *CLIENTS)),
    "settings": ("from streams import EventSourceConfig", ("asyncio", "streams.runtime", *CLIENTS)),
    "an event source, declared": (DECLARED, ("stamina", "anyio.to_process", *ENGINE, *CLIENTS, *EXTRAS)),
    "an engine": ("from streams.source.running import load_engine; load_engine()", ("kafka", *EXTRAS)),
    "a view": (
        "from streams import View; View('t', key=str, value=int)",
        ("streams.source", "streams.runtime.partition", "streams.core.transaction", *ENGINE, *CLIENTS, *EXTRAS),
    ),
    "a task of Spark": (
        "import streams.spark.reading.reader, streams.spark.writing.sink",
        (
            *("kafka", "anyio", "pandas"),
            *("streams.source", "streams.runtime", "streams.core", "streams.stores", "streams.views"),
        ),
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


RUN = """
from streams.testing import TestDriver
with TestDriver(source) as driver:
    driver.send(Added(1), key="a")
    driver.leave(0)
"""


def test_a_run_loads_nothing_that_is_not_loaded_before_a_freeze() -> None:
    """``kes run`` freezes what is loaded (``cli.worker``): what came later would be looked at by each collection."""
    run = {name for name in loaded_by(DECLARED + RUN) if name.startswith("streams.")}
    before = loaded_by(f"{DECLARED}\nfrom streams.source.running import load_engine\nload_engine()")
    # The simulated broker takes more kinds of requests apart than an engine sends.
    tools = ("streams.testing", "streams.journal", "streams.outbox", "streams.kafka.wire.schemas")
    assert sorted(name for name in run - before if not name.startswith(tools)) == []


THREADS = """
import importlib, random, sys, threading
import streams
sys.setswitchinterval(1e-6)
UNINSTALLED = {"PostgresSink", "SinkItem", *streams._NAMES["outbox"].split()}
names = {name for text in streams._NAMES.values() for name in text.split()} - UNINSTALLED
modules = ["runtime.engine", "runtime.connections", "views.view", "stores.table", "journal.term", "disk.sqlite"]
failures, start = [], threading.Barrier(8)

def use(number):
    wanted = sorted(names) + modules
    random.Random(number).shuffle(wanted)
    start.wait()
    for each in wanted:
        try:
            importlib.import_module(f"streams.{each}") if "." in each else getattr(streams, each)
        except Exception as error:
            failures.append(f"{each}: {error!r}")

threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(*failures, sep="\\n")
"""


def test_threads_may_use_names_for_the_first_time_at_once() -> None:
    ran = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == ""


def test_no_package_of_the_library_imports_its_own_modules() -> None:
    """It is why the threads above do not meet; see ``sak.lazy_names``."""
    root = Path(streams.__path__[0])
    apart = {"broker", "spark"}  # tools, which a program has or has not from its first line on
    found = set()
    for file in root.rglob("__init__.py"):
        package = ".".join(("streams", *file.parent.relative_to(root).parts))
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package}."):
                found.add(package.removeprefix("streams."))
    assert found - {"streams"} == apart  # the root has ``sak.lazy_names``, which has no package of names above it
