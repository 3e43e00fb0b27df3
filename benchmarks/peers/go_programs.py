"""Peers in Go that do the work of a system: our program is built when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from benchmarks.peers.programs import checked, go_program
from benchmarks.systems import Kind, Launch, System


class GoProgram(Kind):
    """The program in ``programs/NAME``. ``options``: those that it knows. ``modules``: a name in the report for each
    module whose version matters."""

    is_peer = True
    options: ClassVar[Sequence[str]] = ()
    modules: ClassVar[Mapping[str, str]] = {}

    def launch(self, system: System, say: Callable[[str], None]) -> Launch:
        """The program itself."""
        checked(system.options, self.options)
        program, versions = go_program(self.name, self.modules, say)
        return Launch(command=(str(program),), versions=versions)
