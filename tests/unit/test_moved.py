"""An import of an old path says where the name is now, and nothing else notices."""

from __future__ import annotations

import importlib.util
import pickle
import pkgutil
import subprocess
import sys
from importlib import import_module, reload

import pytest

import streams
from streams.model.moved import GONE, MOVED, explained, new_path

INTERNAL = "it is internal, and may move again"
IMPORTS = {
    "import streams.event_source": "streams.event_source is streams.source.event_source since 0.2; "
    "write: from streams import EventSource",
    "from streams.event_source import EventSource": "write: from streams import EventSource",
    "import streams.event_source as x": "write: from streams import EventSource",
    "from streams import event_source": "streams.event_source is streams.source.event_source since 0.2",
    "from streams import job_settings": "streams.job_settings is streams.settings.jobs since 0.2; write: from "
    "streams.settings import BatcherConfig, COMPUTE, FAST_NETWORK, SLOW_NETWORK, SchedulerConfig, WIDE_NETWORK",
    "from streams.global_table import GlobalTable": "write: from streams.views import GlobalTable",
    "from streams.clients.admin import TopicAdmin": "streams.clients.admin is streams.kafka.questions.admin since 0.2; "
    + INTERNAL,
    "import streams.clients.producing.transactions": "streams.kafka.writing.slot since 0.2",
    "from streams.clients import admin": "the modules of streams.clients are in the folders of streams.kafka since 0.2",
    "from streams.cli.letters import Letter": "streams.cli.letters is streams.looks.letters since 0.2; " + INTERNAL,
    "from streams.topology import Topology": "streams.topology is streams.model.topology since 0.2",
    "import_module('streams.handlers')": "streams.handlers is streams.source.registering since 0.2",
    "import streams.never": "No module named 'streams.never'",
    "from streams import never": "cannot import name 'never' from 'streams'",
    "import streams.clients.never": "the modules of streams.clients are in the folders of streams.kafka",
    "import streamses": "No module named 'streamses'",
}


@pytest.mark.parametrize("statement", IMPORTS)
def test_an_import_of_an_old_path_says_where_the_name_is(statement: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(statement, {"import_module": import_module})
    assert IMPORTS[statement] in str(caught.value)


def old_paths() -> list[str]:
    return [f"{old}.{each.partition('=')[0]}" for (old, _), names in MOVED.items() for each in names.split()]


@pytest.mark.parametrize("old", old_paths())
def test_the_old_path_is_gone_and_the_new_one_is_there(old: str) -> None:
    folder = old.rpartition(".")[0]
    assert folder in GONE or importlib.util.find_spec(old) is None  # a question gets an answer, no error
    assert importlib.util.find_spec(new_path(old)) is not None
    assert explained(old).startswith(f"{old} is {new_path(old)} since 0.2; ")
    assert explained(new_path(old)) == ""


def test_the_names_that_an_error_says_can_be_imported() -> None:
    for statement in {text.rpartition("write: ")[2] for text in map(explained, old_paths()) if "write: " in text}:
        exec(statement)


def test_nothing_else_notices() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"streams\.source\.event_source since"):
        pickle.loads(b"cstreams.event_source\nEventSource\n.")
    assert pickle.loads(pickle.dumps(streams.Record)) is streams.Record
    assert not {"clients", "event_source"} & {module.name for module in pkgutil.iter_modules(streams.__path__)}
    finders = len(sys.meta_path)
    reload(streams)
    assert len(sys.meta_path) == finders
    assert getattr(sys.meta_path[-1], "__name__", "") == "_OldPaths"  # behind all others


def test_an_import_that_succeeds_does_not_load_the_table() -> None:
    program = "import sys, streams.stores, json; from streams import View; print('streams.model.moved' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "False\n"
