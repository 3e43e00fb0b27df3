"""goka, at least once, with its own defaults. It does the work of the measures ``joins`` and ``views`` only.

Option ``storage``: ``memory`` (the default) or ``leveldb``, for the rows.
"""

from __future__ import annotations

from typing import ClassVar

from benchmarks.peers.go_programs import GoProgram


class Goka(GoProgram):
    """A processor with an input, a joined table and an output; or a view."""

    name = "goka"
    options = ("storage",)
    modules: ClassVar = {"goka": "github.com/lovoo/goka", "sarama": "github.com/IBM/sarama"}
