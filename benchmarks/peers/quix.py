"""quixstreams, exactly once; its only kind of store is RocksDB, with a changelog.

Options: ``commit_ms`` (100), ``session_ms`` (45,000), ``transaction_ms`` (60,000), and ``consumer.NAME`` and
``producer.NAME`` for any setting of librdkafka.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

from benchmarks.async_work.quix_environment import NoQuixstreams, quixstreams_python, versions
from benchmarks.peers.programs import SOURCES, checked
from benchmarks.systems import Kind, Launch, System, Unavailable

OPTIONS: Final = ("commit_ms", "session_ms", "transaction_ms", "consumer.", "producer.")
_PROGRAM: Final = SOURCES / "quix" / "accounts.py"

_versions = functools.cache(versions)


class Quixstreams(Kind):
    """Installed into an environment of its own when it is first asked for."""

    name = "quixstreams"
    defaults = ("quixstreams:commit_ms=100", "quixstreams:commit_ms=20")
    is_peer = True
    about = (
        "a dataframe with one stateful function, `exactly-once`; its only store is RocksDB, with a changelog; a "
        "consumer that fetches as soon as the loop's does; `commit_ms`: its commit interval (its own default is 5 s)"
    )

    def launch(self, system: System, say: Callable[[str], None]) -> Launch:
        """By the interpreter of that environment."""
        checked(system.options, OPTIONS)
        try:
            python = quixstreams_python(say)
            found = _versions(python)
        except NoQuixstreams as error:
            raise Unavailable(str(error)) from error
        return Launch(command=(str(python), str(_PROGRAM)), versions=found)
