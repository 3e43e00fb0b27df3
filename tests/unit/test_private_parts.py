"""What is used of libraries beside their documented interfaces, and the versions that it was tried with.

A newer version may change it in silence, so ``pyproject.toml`` stops below the first one that was not tried. To move a
bound: read the library's changes of the parts below, run ``make test-all`` with it, and raise both here.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

ROOT: Final = Path(__file__).resolve().parents[2]


class Tried(NamedTuple):
    """The versions of a library that were tried: ``newest`` is that of the lock files, ``below`` the next one that may
    differ. ``parts``: what is used. ``oldest``: the first one that was tried, where the bound says it."""

    newest: str
    below: str
    parts: str
    oldest: str = ""


TRIED: Final = {
    "confluent-kafka": Tried(
        "2.16.1",
        "2.17",
        "names of errors that librdkafka adds (streams/kafka/translate.py); in tests Message, made by itself, which "
        "2.12.2 cannot",
        "2.13",
    ),
    "msgspec": Tried(
        "0.22.0",
        "0.23",
        "the layout of structs and their allocation (streams/sak/compiling.py), msgspec.inspect",
    ),
    "uvicorn": Tried(
        "0.54.0", "0.55", "HttpToolsProtocol and Server, by subclasses (streams/queries/bounded_protocol.py)"
    ),
}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3])


@pytest.mark.parametrize("library", TRIED)
def test_the_bound_is_the_first_version_that_was_not_tried(library: str) -> None:
    tried, installed = TRIED[library], version(library)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    bounds = [each for each in wanted if each.startswith(f"{library}>")]
    assert [each.endswith(f",<{tried.below}") for each in bounds] == [True]
    assert f">={tried.oldest}" in bounds[0]
    locked = (ROOT / "requirements/dev.txt").read_text()
    assert f"\n{library}=={tried.newest} " in locked, f"{library}: the lock files have another version than was tried"
    assert numbers(installed) < numbers(tried.below), (
        f"{library} {installed} is installed, and {tried.newest} is the newest that was tried; used of it are "
        f"{tried.parts}: see the top of this file"
    )


def test_uvicorn_has_the_parts_that_are_used() -> None:
    methods = (
        "connection_made", "connection_lost", "data_received", "on_headers_complete", "on_message_complete",
        "on_response_complete", "pause_writing", "resume_writing", "timeout_keep_alive_handler",
    )  # fmt: skip
    assert [name for name in methods if not inspect.isfunction(getattr(HttpToolsProtocol, name, None))] == []
    made = inspect.getsource(HttpToolsProtocol.__init__)
    assert [name for name in ("connections", "cycle", "scope", "transport", "loop") if f"self.{name}" not in made] == []
    assert "self.response_complete" in inspect.getsource(RequestResponseCycle.__init__)
    assert inspect.isfunction(FlowControl.pause_writing)
    assert [*inspect.signature(HttpToolsProtocol.__init__).parameters][1:4] == ["config", "server_state", "app_state"]
    assert [*inspect.signature(uvicorn.Server.startup).parameters] == ["self", "sockets"]
    server = inspect.getsource(uvicorn.Server)
    listening = {*re.findall(r"\bserver\.(\w+)\(", server)}
    assert listening == {"close", "wait_closed"}  # what ``_Listening`` stands in for
    assert [name for name in ("lifespan", "servers", "started", "server_state") if f"self.{name}" not in server] == []


def test_msgspec_has_the_parts_that_are_used() -> None:
    class Pair(msgspec.Struct):
        left: int
        right: str = "r"

    assert Pair.__struct_fields__ == ("left", "right")
    assert Pair.__struct_defaults__ == ("r",)
    assert type(Pair.__dict__["left"]).__name__ == "member_descriptor"  # the leaves read the place that it names
    assert isinstance(msgspec.inspect.type_info(Pair), msgspec.inspect.StructType)
