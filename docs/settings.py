"""Writes the page of all settings from their classes: ``python docs/settings.py`` does it again.

Names, types and defaults come from the classes; the meanings are listed here. A setting without a meaning, or a meaning
without its setting, is an error. A test compares the page with the classes.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from streams import BatchProducer, EventProducer, EventSourceConfig, Retry
from streams.outbox import RelayConfig
from streams.outcomes import DEAD_LETTER, PARK, SKIP, STOP
from streams.settings import (
    BatcherConfig,
    GroupConfig,
    ParkingConfig,
    PoolConfig,
    QueryConfig,
    QueueConfig,
    SchedulerConfig,
    StateConfig,
    TimeoutConfig,
)
from streams.views import GlobalChangeLog

PAGE: Final = Path(__file__).resolve().parent / "reference" / "settings.md"

POLICIES: Final = {STOP: "`STOP`", SKIP: "`SKIP`", DEAD_LETTER: "`DEAD_LETTER`", PARK: "`PARK`"}
IN_PARTS: Final = {
    8 * 1024 * 1024: "8 MiB",
    16 * 1024 * 1024: "16 MiB",
    32 * 1024 * 1024: "32 MiB",
    64 * 1024 * 1024: "64 MiB",
    256 * 1024 * 1024: "256 MiB",
    1024 * 1024 * 1024: "1 GiB",
}
DOCUMENTED_ELSEWHERE: Final = {"self", "source", "finalizer", "on_failure"}
"""Arguments that are no settings: the parts that a constructor joins."""


class Section(NamedTuple):
    """One class: its text, and the meaning of each of its settings."""

    settings: type
    text: str
    meanings: dict[str, str]


OUTSIDE: Final = """
## Outside of the code

Every setting of `EventSourceConfig` that is no function can stand outside of the code. The code wins, then the
environment, then the file `kes.toml`.

| where | how | example |
|---|---|---|
| environment | `KES_` and the setting in capitals; within a group, the group's name first | `KES_REPLICATION_FACTOR=3`, `KES_POOL_POOL_SIZE=5`, `KES_ERROR_POLICY=dead_letter` |
| | `KES_CLIENT_SETTINGS_` and librdkafka's name, with `_` for `.` | `KES_CLIENT_SETTINGS_SASL_USERNAME=shop` |
| | `_FILE` behind the name: the file that holds the value, as container platforms mount secrets | `KES_CLIENT_SETTINGS_SASL_PASSWORD_FILE=/run/secrets/kafka` |
| file | `kes.toml` in the current directory, or the file that `KES_CONFIG` names | below |

```toml
bootstrap_servers = "kafka-1:9093,kafka-2:9093"
replication_factor = 3
error_policy = "dead_letter"                        # or { then = "dead_letter", attempts = 6 }

[pool]
pool_size = 5

[client_settings]                                   # librdkafka's names
"security.protocol" = "SASL_SSL"
"sasl.password" = { file = "/run/secrets/kafka" }   # read from there

[commands.run]                                      # options of `kes run`
workers = 2
```

* A group that the code gives (`pool=PoolConfig(...)`) is taken as it is. `client_settings` are joined: a key in the code leaves the others as they are outside.
* `EventProducer`, `GlobalChangeLog` and the commands of `kes` take `bootstrap_servers` and `client_settings` from there, too; Spark takes `KES_BOOTSTRAP_SERVERS` only.
* Options of commands: `KES_RUN_WORKERS=2`, `KES_TOPICS_APPLY_TIMEOUT=10`.
* A key of the file that is no setting, and a value of the wrong type, are errors. `instance_id` cannot stand in the file: each process needs one of its own.
* [`kes config`](command-line.md#config) shows what is in effect, and where it comes from.

[Other variables](command-line.md#environment) are on the page of the command line.
"""  # noqa: E501

SECTIONS: Final = (
    Section(
        EventSourceConfig,
        "The settings of an event source. Three have no default. `kes topics plan` shows what follows from them.",
        {
            "group_id": "consumer group; begins the names of the changelog, the dead letters and the transactional ids",
            "topic": "the topic that is read",
            "num_partitions": (
                "its partitions. Fixed for the life of the state: see [more "
                "partitions](../guides/running.md#more-partitions)"
            ),
            "bootstrap_servers": "the brokers; else `KES_BOOTSTRAP_SERVERS`",
            "client_settings": (
                "settings by librdkafka's names, such as TLS and SASL. Shown by name only: values may be secrets"
            ),
            "source_bootstrap_servers": (
                "[the cluster of the source topic](../guides/moves.md#a-source-on-another-cluster), when it is "
                "another one"
            ),
            "source_client_settings": "as `client_settings`, for that cluster",
            "instance_id": (
                "name of this process, unique in the group; else `KES_INSTANCE_ID`, else made up. Keep it over restarts"
            ),
            "changelog_topic": "name of the changelog; else `<group>.<topic>.changelog`",
            "dead_letter_topic": "name of the dead-letter topic; else `<group>.<topic>.dead-letters`",
            "replication_factor": "number of replicas of the topics that are created. Use 3 where it matters",
            "min_insync_replicas": (
                "number of replicas that must have a record before it counts, in topics that are created: 1 to "
                "`replication_factor`. Use 2 where it matters"
            ),
            "start_at": (
                "where a source that has never run begins, more exactly: a time with its zone (`2026-11-20T00:00Z`), "
                "`earliest`, `latest`, or `[TOPIC:]PARTITION@OFFSET` for single partitions, separated by commas: see "
                "[start anywhere](../guides/beginnings.md). Partitions that it does not name: `auto_offset_reset`"
            ),
            "alignment_seconds": (
                "seconds that the others of [several inputs](../guides/inputs.md) wait for one that is not known to be "
                "at its end"
            ),
            "loop": "handlers send events to the source itself, by `ctx.loop`: see [A loop](../guides/loop.md)",
            "max_loop_hops": (
                "number of events of the loop that may lead to one another; the next one is a `LoopTooLong`. 0: no "
                "bound"
            ),
            "visits": "a topic for requests to visit the keys of the store: see [Visits](../guides/visits.md)",
            "auto_offset_reset": "where a partition begins that never had an offset: `earliest`, `latest` or `error`",
            "decode_policy": (
                "for records that cannot be read or have an unknown type ([errors](../guides/errors.md)); never retried"
            ),
            "error_policy": "for handlers; `on_error=` at the registration replaces it for one event type",
            "max_time_jump_seconds": (
                "seconds by which an event may be ahead of both the member's clock and [the partition's "
                "time](../guides/structures.md#time); beyond, it is a `TimeJump`, which meets its error policy. 0: no "
                "bound"
            ),
            "group": "see `GroupConfig`",
            "timeouts": "see `TimeoutConfig`",
            "queues": "see `QueueConfig`",
            "pool": "see `PoolConfig`",
            "state": "see `StateConfig`",
            "queries": "see `QueryConfig`",
            "parking": "see `ParkingConfig`",
            "on_partition_activated": "called with the partition's number, on the event loop",
            "on_partition_revoked": "called with the partition's number, on the event loop",
            "metrics_handler": "called with each measurement, on the event loop (`streams.metrics`)",
        },
    ),
    Section(
        GroupConfig,
        "How the members of the group share the partitions: [membership](../guides/membership.md), "
        "[moves](../guides/moves.md). "
        "From `num_standbys` to `leave_timeout_seconds` they are for the strategy `incremental`.",
        {
            "strategy": (
                "`incremental`, `cooperative-sticky`, `range` or `roundrobin`; two of them, the wanted one first,"
                " while a group migrates"
            ),
            "membership": "who shares the partitions out: `streams` (the members) or `broker` (KIP-848)",
            "static_membership": "make `instance_id` the member's `group.instance.id` too",
            "num_standbys": "number of warm copies of each partition on other members",
            "max_moves": "number of partitions that are prepared for a move at a time, in the whole group",
            "max_move_bytes": (
                "bytes of changelogs on disk that are prepared at a time; one partition is always allowed"
            ),
            "preparation_timeout_seconds": "seconds after which a copy that is not ready is passed over",
            "leave_timeout_seconds": (
                "seconds for which a member that stops hands its partitions over, before it gives up the rest; 0: at "
                "once"
            ),
            "publish_status": "publish progress for `kes group`, as offsets of the group `<group>.<instance>.status`",
        },
    ),
    Section(
        TimeoutConfig,
        "How long an event source waits: each more than 0 and less than a day. A transaction's time must be "
        "less than the session's, three heartbeats must fit into a session, and a drain must be shorter than "
        "a rebalance.",
        {
            "session_timeout_seconds": (
                "seconds without a heartbeat after which the group gives up a member. 6 is the least that brokers "
                "allow "
                "by default (`group.min.session.timeout.ms`)"
            ),
            "transaction_timeout_seconds": "seconds after which the broker aborts a transaction",
            "heartbeat_interval_seconds": (
                "seconds between two heartbeats; a member learns of a rebalance as late as that"
            ),
            "rebalance_timeout_seconds": (
                "seconds that members have to take part in a rebalance. The event loop may stand still for as long "
                "until "
                "the event that stops it is noted for the next owners; after as long again the member leaves the group"
            ),
            "drain_timeout_seconds": "seconds for running events, when a partition is given up or the source stops",
            "call_timeout_seconds": "seconds for one transactional call",
            "recovery_timeout_seconds": (
                "seconds to bring a failed transaction to an end, before the source stops with an error"
            ),
        },
    ),
    Section(
        QueueConfig,
        "Records that were read and wait to be handled: [memory](../guides/running.md#memory-and-slow-lines).",
        {
            "max_queued_records": "number of waiting records of one partition beyond which it is paused",
            "max_queued_bytes": "bytes of waiting records of one partition beyond which it is paused",
            "max_queued_bytes_total": (
                "bytes of waiting records of all partitions of the process. Beyond half of it, partitions that hold "
                "their share of the "
                "other half are paused"
            ),
            "max_poll_records": "number of records that the poll thread hands over at once, at most",
        },
    ),
    Section(
        PoolConfig,
        "The pool of transactional producers, and the rule by which events are batched into transactions.",
        {
            "pool_size": "number of producers, which are used in turn; at least `pending_transactions` + 2",
            "pending_transactions": "number of sealed transactions that may be under way at a time",
            "target_batch_size": (
                "number of events or records, whichever is more, at which a transaction is sealed when the pipeline is "
                "free"
            ),
            "max_batch_size": "number of events or records, whichever is more, at which intake stops",
            "max_batch_bytes": "bytes of outputs and changes at which intake stops (keys, values, headers)",
            "batch_delay_seconds": (
                "seconds that a transaction waits for further events when nothing is in flight; 0: it does not; "
                "`None`: as long as commits take, at most 10 ms"
            ),
        },
    ),
    Section(
        QueryConfig,
        "[Queries](../guides/queries.md) between processes.",
        {
            "secret_file": "file with the group's secret, at least 16 bytes: the same for all members and readers",
            "address": "published for readers: `https://HOST:PORT`. `kes run --queries` fills it in where it is empty; "
            "else further workers take the ports behind it",
            "tls_certificate_file": "of the server that answers; without it only on the loopback",
            "tls_key_file": "its key",
            "tls_ca_file": "certificates by which readers check the server; empty: those of the system",
            "operate": "who has the secret may also act on [parked keys](../guides/parking.md) while members run",
        },
    ),
    Section(
        ParkingConfig,
        "[Parked keys](../guides/parking.md): their pace, and their bounds in each partition.",
        {
            "first_retry_seconds": (
                "seconds after which the first event of a parked key is tried again; doubled with each failure"
            ),
            "max_retry_seconds": "seconds of the longest pause",
            "max_keys": "number of parked keys",
            "max_key_events": "number of events in the queue of one key",
            "max_bytes": "bytes of all events that are queued",
            "when_full": (
                "what happens at an event that finds no room: `wait` (its partition waits) or `stop` (the source stops)"
            ),
        },
    ),
    Section(
        StateConfig,
        "[State on disk](../guides/state-on-disk.md): a partition goes on from its folder, and reads only the rest of "
        "the changelog.",
        {
            "folder": "where it is; processes of one machine may share it. Empty: nowhere",
            "checkpoint_seconds": "seconds after which committed changes are written to disk",
            "checkpoint_bytes": "bytes of committed changes of one partition at which they are written earlier",
            "unwritten_bytes": (
                "bytes of committed changes that may wait for the disk in the process, at least `checkpoint_bytes`; "
                "beyond it the folder that is "
                "farthest behind is left at its mark; for tables on an engine the intake waits"
            ),
            "memory_bytes": "bytes of the caches of all tables on an engine in the process",
            "snapshots": (
                "where [snapshots](../guides/state-on-disk.md#snapshots) are: a path, or an address like "
                "`s3://bucket/kes`. Empty: none"
            ),
            "snapshot_seconds": "age in seconds at which a snapshot of a partition is followed by the next one",
            "snapshots_kept": "number of snapshots that are kept of each partition, 2 or more",
            "snapshot_bytes_per_second": "bytes of snapshots that the process writes in a second, at most; 0: no limit",
            "snapshot_secret_file": (
                "a file with a secret of 16 bytes or more: snapshots are signed with it, and others are refused"
            ),
        },
    ),
    Section(
        Retry,
        "How often failed work is tried again, and what comes after the last attempt: of events "
        "([`error_policy`, `on_error`](../guides/errors.md)), jobs, batches (`retry`) and views. Ready ones, with one "
        "attempt: `STOP`, `SKIP`, `DEAD_LETTER`, `PARK`.",
        {
            "attempts": "number of attempts, the first one included",
            "backoff_seconds": "seconds of the wait before the second attempt",
            "max_backoff_seconds": "seconds of the longest wait",
            "backoff_factor": "factor by which each wait is longer than the one before",
            "jitter": "share of a wait, up to which it is made longer or shorter at random",
            "timeout_seconds": (
                "seconds since the first attempt began after which there is no other one; `None`: no such bound"
            ),
            "on": "classes of exceptions that are worth another attempt (in code only)",
            "then": (
                "the last word about an event: `FAIL_CONSUMER`, `DEAD_LETTER`, `PARK`, `CONTINUE` or "
                "`FATALLY_EXIT`; a job or a batch has none"
            ),
            "waits": (
                "what waits between two attempts at an event: `partition`, or its [`key`](../guides/parking.md) alone; "
                "of events only"
            ),
        },
    ),
    Section(
        SchedulerConfig,
        "The limits of an [`AsyncJobScheduler`](../guides/async-jobs.md), and of a handler with `concurrency=`.",
        {
            "concurrency": "number of jobs that run at a time in this process, all partitions together",
            "worker_queue_depth": "number of jobs of one key that may wait behind the one that runs",
            "max_concurrent_keys": "number of keys of one partition that may have jobs",
            "timeout_seconds": "seconds for one attempt of a job; `None`: as long as it takes",
            "retry": "a `Retry`; `None`: one attempt",
            "rate_per_second": "jobs that begin in a second in this process; `None`: as many as have a slot",
            "max_jobs": "durable jobs (`ctx.start_job`) that one partition may have, waiting ones included",
            "when_full": "at that bound: `wait` takes no further input, `fail` raises `JobsFull` in the handler",
        },
    ),
    Section(
        BatcherConfig,
        "The limits of an [`AsyncBatcher`](../guides/batching.md).",
        {
            "max_batch_size": "number of items of one call, at most",
            "max_delay_seconds": "seconds that an item waits for company when a call may begin",
            "max_concurrent_batches": "number of calls that run at a time in this process",
            "max_queued_items": "number of items of one partition that wait or run, beyond which its reading waits",
            "timeout_seconds": "seconds for one attempt of a call; `None`: as long as it takes",
            "retry": "a `Retry` for a call that raises, with all of its items; `None`: one attempt",
        },
    ),
    Section(
        EventProducer,
        "A producer of typed events, in any program: [producing events](events.md#producing-events).",
        {
            "bootstrap_servers": "the brokers; else `KES_BOOTSTRAP_SERVERS`",
            "client_settings": "as those of `EventSourceConfig`",
            "transactional_id": "name of the producer of `transaction()`: one per process, the same after a restart",
            "max_queued_records": "number of records sent and not acknowledged beyond which calls wait",
            "delivery_timeout_seconds": "seconds for which a record is tried",
            "transaction_timeout_seconds": "seconds after which the broker aborts a transaction",
            "partitioner": "places keys: `murmur2`, `crc32` (librdkafka's default) or `fnv1a` (sarama)",
        },
    ),
    Section(
        BatchProducer,
        "Records for another cluster, at least once: [batches](../guides/batching.md#records-for-another-cluster).",
        {
            "bootstrap_servers": "the brokers; else those of the event source",
            "client_settings": "on top of those of the event source; with `bootstrap_servers` in place of them",
            "max_queued_records": (
                "number of records on their way; events beyond wait, and their partitions' reading with them"
            ),
            "delivery_timeout_seconds": "seconds for which a record is tried",
            "name": "name in logs and statistics",
        },
    ),
    Section(
        RelayConfig,
        "A relay of an outbox: [the outbox](../guides/outbox.md).",
        {
            "name": "of the outbox in Kafka: its topic is `<name>.outbox`",
            "database": "address for psycopg, or `sqlite:FILE`; else `KES_OUTBOX_DATABASE`",
            "bootstrap_servers": "the brokers; else `KES_BOOTSTRAP_SERVERS`",
            "client_settings": "as those of `EventSourceConfig`",
            "table": "name of the outbox's table",
            "batch_rows": "number of rows of one transaction, at most",
            "batch_bytes": "bytes of keys and values of one transaction, about",
            "backoff_seconds": "seconds until a refused row is tried again; doubled each time",
            "max_backoff_seconds": "seconds of the longest such wait",
            "session_seconds": (
                "seconds until a relay that was killed or cut off is replaced; brokers allow 6 and more by default"
            ),
        },
    ),
    Section(
        GlobalChangeLog,
        "A read-only view of a whole topic: [global change logs](../guides/global-change-log.md).",
        {
            "topic": "the topic that is followed",
            "bootstrap_servers": "the brokers; else `KES_BOOTSTRAP_SERVERS`",
            "client_settings": "as those of `EventSourceConfig`",
            "on_error": ("for a record that cannot be decoded, or a receiver that raises: a `Retry`, or a function"),
            "client_id": "name of the client at the broker",
            "topic_timeout_seconds": "seconds that the start waits for a topic that is missing",
            "only_compacted": "a topic that is not compacted is refused, where there is a warning else",
        },
    ),
)


def settings_of(kind: type) -> dict[str, tuple[str, Any]]:
    """Return name, type and default of each setting of a class (``inspect.Parameter.empty`` without a default)."""
    if issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        types = inspect.get_annotations(kind)
        return {
            each.name: (
                types[each.name],
                each.default
                if each.default is not msgspec.NODEFAULT
                else each.default_factory()
                if each.default_factory is not msgspec.NODEFAULT
                else inspect.Parameter.empty,
            )
            for each in fields
        }
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {
        each.name: (str(each.annotation), each.default) for each in parameters if each.name not in DOCUMENTED_ELSEWHERE
    }


def shown(name: str, default: Any) -> str:
    """Return a default as a reader writes it."""
    if default is inspect.Parameter.empty:
        return "**required**"
    if isinstance(default, Retry):
        return POLICIES[default]
    if isinstance(default, msgspec.Struct):
        return f"`{type(default).__name__}()`"
    if isinstance(default, int) and default in IN_PARTS and "bytes" in name:
        return IN_PARTS[default]
    if isinstance(default, int | float) and not isinstance(default, bool):
        return f"{default:,g}" if default < 1_000_000 else f"{default:,}"
    if isinstance(default, tuple):
        return f"`({', '.join(each.__name__ for each in default)},)`"
    if isinstance(default, str | dict | None):
        return f"`{default!r}`" if default else "" if default is not None else "none"
    return f"`{getattr(default, 'name', default)}`"


def table(section: Section) -> str:
    """Return the section of one class. Raises ``ValueError`` if a setting has no meaning, or a meaning no setting."""
    settings = settings_of(section.settings)
    if missing := settings.keys() ^ section.meanings.keys():
        raise ValueError(
            f"{section.settings.__name__}: {', '.join(sorted(missing))}: a setting, or its meaning, is missing"
        )
    rows = [
        f"| `{name}` | {kind_of(kind)} | {shown(name, default)} | {section.meanings[name]} |"
        for name, (kind, default) in settings.items()
    ]
    head = [f"## {section.settings.__name__}", "", section.text, "", "| setting | type | default | meaning |"]
    return "\n".join([*head, "|---|---|---|---|", *rows, ""])


def kind_of(annotation: object) -> str:
    """Return a type as it is shown: the classes without their modules."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = re.sub(r"\[StoreT(, \w+)*\]", "", text)
    return "`" + text.replace("|", "\\|") + "`"


def outputs() -> dict[Path, str]:
    """Return the page, by its path."""
    head = [
        "# Settings",
        "",
        "<!-- Written by `python docs/settings.py`: a change here is lost. -->",
        "",
        "All settings of all classes, with their defaults. Units are in the names. Classes of settings are "
        "frozen and keyword-only; a wrong value is a "
        "`ConfigError` that names the setting, raised where the settings are made.",
        "",
        *OUTSIDE.strip().splitlines(),
        "",
    ]
    return {PAGE: "\n".join([*head, *(table(section) for section in SECTIONS)])}


def main() -> None:
    """Write what differs."""
    for path, text in outputs().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()
