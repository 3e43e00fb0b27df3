"""``kes new``: a small project to begin with: an event source, its test, a producer."""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path
from string import Template
from typing import Annotated, Final

import typer
from rich.text import Text

from streams.cli.cluster import Json
from streams.cli.console import emit
from streams.errors import ConfigError

app = typer.Typer()

_SOURCE: Final = '''\
"""The event source: every order counts once, in the state and in what is sent on."""

from __future__ import annotations

import msgspec
from streams import DEAD_LETTER, EventContext, EventSource, EventSourceConfig, Table, event_type

TOTALS = "$name-totals"
Totals = Table[str, int]


@event_type("Ordered")
class Ordered(msgspec.Struct, frozen=True):
    """The input: a customer has ordered something."""

    customer: str
    cents: int


@event_type("Total")
class Total(msgspec.Struct, frozen=True):
    """The output: what a customer has ordered in all."""

    customer: str
    cents: int


def make_source() -> EventSource[Totals]:
    """Make the event source. Tests make one each."""
    source = EventSource(
        EventSourceConfig(group_id="$name", topic="$name-orders", num_partitions=4),
        store=Table.factory(key=str, value=int),
    )
    source.output(TOTALS)

    @source.on(on_error=DEAD_LETTER)
    def on_ordered(ctx: EventContext[Totals], event: Ordered) -> None:
        if event.cents <= 0:
            raise ValueError(f"an order of {event.cents} cents")
        total = ctx.store.get(event.customer, 0) + event.cents
        ctx.store.put(event.customer, total)
        ctx.forward(TOTALS, Total(event.customer, total), key=event.customer)

    return source


source = make_source()
'''

_TEST: Final = '''\
"""The event source on the real engine, without a broker."""

from __future__ import annotations

from streams.testing import TestDriver

from $name import TOTALS, Ordered, Total, make_source


def test_orders_add_up_per_customer() -> None:
    with TestDriver(make_source()) as driver:
        for customer, cents in [("ann", 500), ("ben", 100), ("ann", 250)]:
            driver.send(Ordered(customer, cents), key=customer)
        totals = driver.outputs(TOTALS, Total)
        assert [total for total in totals if total.customer == "ann"] == [Total("ann", 500), Total("ann", 750)]


def test_an_order_of_nothing_becomes_a_dead_letter() -> None:
    with TestDriver(make_source()) as driver:
        driver.send(Ordered("ann", 0), key="ann")
        [letter] = driver.dead_letters()
        assert letter.header("__kes_dlq_message") == b"an order of 0 cents"
        assert driver.outputs(TOTALS, Total) == []


def test_a_crash_before_the_commit_counts_nothing_twice() -> None:
    with TestDriver(make_source()) as driver:
        trap = driver.at("commit.before", driver.crash)
        driver.send(Ordered("ann", 500), key="ann")
        assert trap.sprung == 1
        driver.restart()
        assert driver.outputs(TOTALS, Total) == [Total("ann", 500)]
'''

_PRODUCER: Final = '''\
"""Send orders: python produce.py ann 500 ben 250"""

from __future__ import annotations

import sys

from streams import EventProducer

from $name import Ordered


def main(words: list[str]) -> None:
    with EventProducer() as producer:  # the broker of KES_BOOTSTRAP_SERVERS
        for customer, cents in zip(words[::2], words[1::2], strict=True):
            delivery = producer.send("$name-orders", Ordered(customer, int(cents)), key=customer)
            print(f"$name-orders {delivery.partition}@{delivery.offset}: {customer} {cents}")


if __name__ == "__main__":
    main(sys.argv[1:])
'''

_PROJECT: Final = """\
[project]
name = "$name"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["kafka-event-source[cli]"]

[dependency-groups]
dev = ["kafka-event-source[test]"] # pytest, and a Kafka to develop with

[tool.pytest.ini_options]
pythonpath = ["."]

[tool.ruff]
line-length = 120
"""

_README: Final = """\
# $name

An event source that adds up what customers order, exactly once.

```
python -m pytest                                             # its tests, without a broker
kes broker start                                             # a real Kafka; prints its address
export KES_BOOTSTRAP_SERVERS=127.0.0.1:9092                  # that address
kes topics apply $name:source
kes run $name:source                                         # in another terminal; Ctrl-C drains and stops it
python produce.py ann 500 ben 250 ann 250 ben 0
kes tail $name-totals
kes state scan $name:source
kes dlq list $name:source                                    # ben's order of nothing
```

`$name.py` is the source, `test_$name.py` its test, `produce.py` sends events from anywhere. Settings that are not
in the code can be in `kes.toml`: `kes config $name:source` shows what is in effect.
"""

_SETTINGS: Final = """\
# Settings that are not in the code, for all commands in this folder. A variable wins over a line here.

# bootstrap_servers = "127.0.0.1:9092"  # KES_BOOTSTRAP_SERVERS

# [commands.run]
# workers = 2  # KES_RUN_WORKERS
"""

_IGNORED: Final = """\
.venv/
__pycache__/
.pytest_cache/
state/
"""

FILES: Final = {
    "$name.py": _SOURCE,
    "test_$name.py": _TEST,
    "produce.py": _PRODUCER,
    "pyproject.toml": _PROJECT,
    "README.md": _README,
    "kes.toml": _SETTINGS,
    ".gitignore": _IGNORED,
}
"""Names and contents of the files; ``$name`` stands for the project's name."""


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the project and its module: shop, order_totals.")],
    json: Json = False,
) -> None:
    """Create a folder with an event source, its test and a producer, ready to run.

    Exit codes: 0 created; 1 the folder exists and is not empty, or cannot be written; 2 not a valid module name.
    """
    _check(name)
    folder = Path(name)
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} exists and is not empty: nothing is overwritten")
        folder.mkdir(exist_ok=True)
        names = []
        for file, text in FILES.items():
            names.append(Template(file).substitute(name=name))
            (folder / names[-1]).write_text(Template(text).substitute(name=name))
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    tests = "" if importlib.util.find_spec("pytest") else "pip install 'kafka-event-source[test]' && "
    steps = f"next: cd {folder} && {tests}python -m pytest; README.md has the rest"
    emit({"folder": str(folder), "files": names}, json, lambda: Text(f"{folder}: {', '.join(names)}\n{steps}"))


def _check(name: str) -> None:
    wrong = ""
    if not (name.isidentifier() and name.isascii() and name == name.lower() and len(name) <= 50):
        wrong = "is no name for a module: lower-case letters, digits and _"
    elif keyword.iskeyword(name) or name.startswith(("_", "test_")) or name == "produce":
        wrong = "cannot be the name of a module here"
    elif name in sys.stdlib_module_names or _is_installed(name):
        wrong = "is the name of a module that is there already: yours would hide it"
    if wrong:
        raise typer.BadParameter(f"{name!r} {wrong}", param_hint="NAME")


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return True  # half of it is there
    return spec is not None and spec.origin is not None  # a folder of the user's is no module yet
