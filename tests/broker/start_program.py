"""``kes offsets start``, or ``kes reset``, as a process that is killed at a step: "before" or "after" a call (the
first, or the one of a number), or "within" one, so many milliseconds behind its begin.

python start_program.py BOOTSTRAP GROUP TOPIC STEP COMMAND OPTIONS
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from types import ModuleType
from typing import Any

from streams import EventSource
from streams.cli import main
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.writing.blocking import BlockingSlot
from streams.stores.foreign import ForeignRow
from tests.vocabulary import TOTALS, config_of


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step: str) -> None:
    """``step``: such as "after hold", "before grow 2", or "within commit 2"."""
    when, name, *number = step.split()
    owner: Any = next(each for each in (BlockingSlot, GroupChecks, TopicAdmin) if hasattr(each, name))
    call, calls = getattr(owner, name), itertools.count(1)

    def struck(*arguments: Any) -> Any:
        is_now = when != "within" and next(calls) == (int(number[0]) if number else 1)
        if when == "before" and is_now:
            die()
        if when == "within":
            threading.Timer(float(*number) / 1000, die).start()
        found = call(*arguments)
        if when == "after" and is_now:
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
