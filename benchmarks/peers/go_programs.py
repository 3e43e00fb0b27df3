"""Peers in Go: our program is built, and the modules it needs are fetched with their checksums (``go.sum``), when it is
first asked for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from benchmarks.peers.programs import SOURCES, built, checked, output_of
from benchmarks.systems import Kind, Launch, System, Unavailable

_BUILD_SECONDS: Final = 600


class GoProgram(Kind):
    """The program in ``programs/NAME``. ``options``: those that it knows. ``modules``: a name in the report for each
    module whose version matters."""

    is_peer = True
    options: ClassVar[Sequence[str]] = ()
    modules: ClassVar[Mapping[str, str]] = {}

    def launch(self, system: System, say: Callable[[str], None]) -> Launch:
        """The program itself."""
        checked(system.options, self.options)
        go, folder = shutil.which("go"), SOURCES / self.name
        if go is None:
            raise Unavailable("there is no go on PATH: install the Go of the program's go.mod, or newer")
        version = output_of([go, "env", "GOVERSION"], 20, folder).strip()
        sources = [folder / name for name in ("main.go", "go.mod", "go.sum")]

        def compiled(into: Path) -> None:
            say(f"fetching and compiling {self.name} (a minute or two)")
            output_of([go, "build", "-mod=readonly", "-o", str(into / self.name), "."], _BUILD_SECONDS, folder)

        program = built(self.name, sources, version, compiled) / self.name
        found = required(sources[1].read_text(), self.modules)
        return Launch(command=(str(program),), versions={**found, "go": version[2:]})


def required(text: str, modules: Mapping[str, str]) -> dict[str, str]:
    """Find the versions that matter in a ``go.mod``."""
    found = dict(re.findall(r"^\s*(?:require )?(\S+) v(\S+)", text, re.MULTILINE))
    return {name: found[module] for name, module in modules.items()}
