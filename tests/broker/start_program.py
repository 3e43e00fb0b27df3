"""``kes offsets start``, or ``kes reset``, as a process that is killed at a step: "before" or "after" a call, or
"within" one, so many milliseconds behind its begin.

python start_program.py BOOTSTRAP GROUP TOPIC STEP COMMAND OPTIONS
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import ModuleType
from typing import Any

from streams import EventSource
from streams.cli import main
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.writing.blocking import BlockingSlot
from streams.stores.foreign import ForeignRow
from tests.vocabulary import TOTALS, config_of


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step: str) -> None:
    """``step``: such as "after hold", or "within commit 2"."""
    when, name, *ms = step.split()
    owner: Any = BlockingSlot if hasattr(BlockingSlot, name) else GroupChecks
    call = getattr(owner, name)

    def struck(*arguments: Any) -> Any:
        if when == "before":
            die()
        if when == "within":
            threading.Timer(float(*ms) / 1000, die).start()
        found = call(*arguments)
        if when == "after":
            die()
        return found

    setattr(owner, name, struck)


def take(store: Any, row: ForeignRow) -> None:
    """A row with a number in decimal digits."""
    store.put((row.key or b"").decode(), int(row.value))


if __name__ == "__main__":
    bootstrap, group, topic, step, command, *words = sys.argv[1:]
    if step:
        die_at(step)
    settings = {"group_id": group, "topic": topic, "num_partitions": 2, "bootstrap_servers": bootstrap}
    sys.modules["shop"] = ModuleType("shop")
    vars(sys.modules["shop"]).update(source=EventSource(config_of(**settings), TOTALS), take=take)
    sys.exit(main.main([*command.split(), "shop:source", *words, "--yes", "--json"]))
