"""One worker process of ``kes run``: import the event source, run it, leave with a code that the supervisor can read.

Exit codes: 0 drained or finished; 78 a problem that a restart does not solve (a wrong setting, a topic that differs, a
module that cannot be imported); 65 a record that fails at every start; 70 failed, worth another start. (Not 1 for the
problem: an interpreter that dies of an exception also exits with 1, and that is worth another start.)
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from streams.cli.console import complain
from streams.cli.failures import innermost, leave
from streams.cli.logging_setup import LogFormat, LogOptions, configure_logging, one_record
from streams.cli.supervisor_channel import Channel, Done, GroupIdentity, Remove, Removed, Serving
from streams.core.policy import FINAL
from streams.errors import (
    ConfigError,
    EmbeddedBrokerError,
    EventFailure,
    MembershipFatal,
    OffsetError,
    RegistrationError,
    StreamsError,
    TopicError,
)
from streams.logs import exception_info
from streams.model.loading import described, load
from streams.statistics import SourceState

log = logging.getLogger("streams.cli.worker")  # the module runs as __main__

EXIT_PROBLEM = 78
EXIT_FAILED = 70
EXIT_BAD_RECORD = 65
GC_THRESHOLD = 5_000
"""Python's own threshold is 700 (3.11), for programs that make few objects and keep most. Jobs come by the thousand,
live for a while and go together: with 5,000, and modules frozen, collecting took a third of the time
(docs/internals/performance.md)."""
ORPHAN_DRAIN_SECONDS = 10.0
CHECK_SECONDS = 0.2
"""Between two checks of the member id: a worker that dies younger than that has its session waited out."""
JOIN_FIRST_SECONDS = 1.0
"""Wait of a member without a name, so that it joins before it removes another one: brokers make the
first member of an empty group wait for more (``group.initial.rebalance.delay.ms``, 3 s unless set)."""
REMOVE_PATIENCE_SECONDS = 60.0
"""Time limit for removing a dead member; its session is over by then."""
_REMOVERS = (SourceState.RUNNING, SourceState.STOPPING)
# For these a setting or a topic has to be changed first: another start would end in the same way.
NOT_FOR_RESTART = (ConfigError, RegistrationError, TopicError, OffsetError, EmbeddedBrokerError, MembershipFatal)


class WorkerOptions(msgspec.Struct, frozen=True):
    """The options of a worker, one argument of its command line: every user of the machine may read them."""

    source: str
    logs: LogOptions
    gc_threshold: int = GC_THRESHOLD
    metrics: bool = False
    facts: bool = False
    """Serve facts for the pages of ``--http`` beside the metrics."""
    queries: str = ""
    """The address for queries of other processes: the first worker's, the others take the ports behind it."""


def main(argv: Sequence[str]) -> int:
    """``argv`` is the ``WorkerOptions`` as JSON, and the descriptor of the channel to the supervisor."""
    options, descriptor = msgspec.json.decode(argv[0], type=WorkerOptions), int(argv[1])
    name = os.environ.get("KES_INSTANCE_ID", "")
    supervised = _Supervised(Channel(socket.socket(fileno=descriptor)))
    threading.Thread(target=supervised.attend, name="kes-supervisor-watch", daemon=True).start()
    try:
        configure_logging(options.logs, worker=name)
        supervised.source = load(options.source)
        if options.metrics or options.facts:
            supervised.serve_metrics(options.facts)
        if options.queries:
            supervised.serve_queries(options.queries, name)
        if "streams.source.running" in sys.modules:  # it would load its engine behind the freeze
            from streams.source.running import load_engine

            load_engine()
        collect_rarely(options.gc_threshold)
        supervised.source.run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as error:  # of the user's code: whatever its code is, it was not to stop
        log.critical("the worker ends without a drain: %r in the source's code", error, exc_info=exception_info(error))
        return EXIT_FAILED
    except Exception as error:
        return _failed(name, innermost(error), options.logs)
    supervised.left()
    return 0


def collect_rarely(threshold: int) -> None:
    """Modules and what they made are not looked at again by the garbage collector, and new objects only after so many.
    0 leaves it as it is. (In a process of the user's own that is the user's choice.)"""
    if threshold:
        gc.collect()
        gc.freeze()
        gc.set_threshold(threshold, *gc.get_threshold()[1:])


class _Supervised:
    """The worker's side of the channel: reports the name by which the group knows it, and removes members that died."""

    def __init__(self, channel: Channel) -> None:
        self.source: Any = None
        self._channel = channel
        self._reported = ""
        self._gone = False
        self._reporting = threading.Lock()

    def attend(self) -> NoReturn:
        """Listen until the supervisor is gone, then drain as after SIGTERM; a drain that hangs is cut off."""
        while (messages := self._channel.receive(CHECK_SECONDS)) is not None:
            for message in messages:
                if isinstance(message, Remove):
                    threading.Thread(
                        target=self._remove, args=(message,), name="kes-remove-member", daemon=True
                    ).start()
            self._report_member()
        log.warning("the supervisor is gone: draining")
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(ORPHAN_DRAIN_SECONDS)
        os._exit(EXIT_FAILED)

    def serve_metrics(self, with_facts: bool) -> None:
        """Serve the source's metrics to the supervisor, on a free port of the loopback address; and facts for its
        pages. Every request needs a secret that goes over the channel only: other users of the machine, and pages of
        other sites by a name server, reach that port, too."""
        from streams.observability import PrometheusMetrics, RelayMetrics
        from streams.outbox.relay import Relay
        from streams.source.event_source import EventSource

        address, secret = "127.0.0.1:0", secrets.token_urlsafe(32)
        if isinstance(self.source, EventSource) and with_facts:
            from streams.web.facts import SourceFacts
            from streams.web.workers import facts_probe

            further = {"/facts": facts_probe(SourceFacts(self.source))}
            port = PrometheusMetrics(self.source).serve(address, further, secret).port
        elif isinstance(self.source, EventSource):
            port = PrometheusMetrics(self.source).serve(address, secret=secret).port
        elif isinstance(self.source, Relay) and not with_facts:
            port = RelayMetrics(self.source).serve(address, secret).port
        else:
            option = "--http" if with_facts else "--metrics"
            raise ConfigError(f"{option} needs an EventSource; the source is {type(self.source).__name__}")
        self._channel.send(Serving(port, secret))

    def serve_queries(self, address: str, name: str) -> None:
        """Answer the queries of other processes at the address, the first worker's; the others take the ports behind
        it."""
        from streams.source.event_source import EventSource

        try:
            from streams.queries import QueryServer
        except ModuleNotFoundError as error:
            raise ConfigError(f"--queries: {error}") from None
        if not isinstance(self.source, EventSource):
            raise ConfigError(f"--queries needs an EventSource; the source is {type(self.source).__name__}")
        config, number = self.source.config, name.rpartition("-")[2]
        behind = int(number) if number.isdecimal() else 0
        if config.queries.address:  # published: each worker has its own, or questions would come to the first alone
            published = msgspec.structs.replace(config.queries, address=port_behind(config.queries.address, behind))
            self.source.config = msgspec.structs.replace(config, queries=published)
        QueryServer(self.source, port_behind(address, behind))

    def left(self) -> None:
        """Report a good end of ``run``, and that there is nothing to remove (a static member keeps its place)."""
        with self._reporting:
            self._gone = True
            self._channel.send(GroupIdentity(""))
            self._channel.send(Done())

    def _report_member(self) -> None:
        with self._reporting:
            member_id = getattr(self.source, "member_id", "")
            # Never that it has none: that one was lost, or is being left, does no harm when it is removed, too.
            if member_id and member_id != self._reported and not self._gone:
                self._reported = member_id
                self._channel.send(GroupIdentity(member_id, _group_instance(self.source)))

    def _remove(self, request: Remove) -> None:
        """Remove a dead member from the group, as soon as possible: our source may only just be starting."""
        deadline = time.monotonic() + REMOVE_PATIENCE_SECONDS
        remove = getattr(self.source, "remove_member", None)
        while remove is None or getattr(self.source, "state", None) not in _REMOVERS:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
            remove = getattr(self.source, "remove_member", None)
        join_first = time.monotonic() + JOIN_FIRST_SECONDS
        while not (own := getattr(self.source, "member_id", "")) and time.monotonic() < join_first:
            time.sleep(0.02)
        if request.member_id == own:
            return
        try:
            found = remove(request.member_id, request.group_instance, deadline - time.monotonic())
        except StreamsError as error:
            log.warning(
                "the dead member %s could not be removed (%s): its session has to expire", request.member_id, error
            )
            return
        if found:
            log.info("removed the dead member %s from the group", request.member_id)
        self._channel.send(Removed(request.member_id, found))


def port_behind(address: str, number: int) -> str:
    """Return the address with the port so many behind; 0, a free one, and what is no port stay."""
    host, colon, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port)):
        return address
    return f"{host}{colon}{int(port) + number}"


def _group_instance(source: Any) -> str:
    """Return the group instance id of a static member, or nothing."""
    config: Any = getattr(source, "config", None)  # of any object that has a method run
    if not getattr(getattr(config, "group", None), "static_membership", False):
        return ""
    return str(config.instance_id or os.environ.get("KES_INSTANCE_ID", ""))


def _failed(name: str, error: Exception, logs: LogOptions) -> int:
    with suppress(OSError):  # as in ``complain``: the exit code counts
        if isinstance(error, StreamsError):
            _report(name, error, logs)
        elif _are_for_programs(logs):
            log.critical("the worker fails: %s", described(error), exc_info=exception_info(error))
        else:  # the user's code: its stack trace is what they need
            _write_trace(traceback.format_exception(*exception_info(error)))
    if isinstance(error, EventFailure) and isinstance(error.__cause__, FINAL):
        return EXIT_BAD_RECORD
    return EXIT_PROBLEM if isinstance(error, NOT_FOR_RESTART) else EXIT_FAILED


def _write_trace(lines: list[str]) -> None:
    sys.stderr.write(one_record("".join(lines).rstrip("\n")) + "\n")


def _are_for_programs(logs: LogOptions) -> bool:
    """Check whether what is said at the end is a log line as well: JSON, or where a configuration file sends it."""
    return logs.format is LogFormat.JSON or bool(logs.config)


def _report(name: str, error: StreamsError, logs: LogOptions) -> None:
    if os.environ.get("KES_DEBUG") == "1":
        _write_trace(traceback.format_exception(error))
    cause = error.__cause__
    hint = f"caused by {described(cause)}" if cause is not None and not isinstance(error, ConfigError) else ""
    if _are_for_programs(logs) and not isinstance(error, EventFailure):
        log.critical("%s: %s%s", type(error).__name__, error, hint and f" ({hint})")
    if logs.format is LogFormat.JSON:
        return
    if not isinstance(error, EventFailure):
        complain(f"{name}: {type(error).__name__}: {error}", hint=hint)
    elif hint and not isinstance(cause, FINAL):  # the engine has logged the failure when it began to stop
        complain(f"{name}: {hint}")


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
