"""Modules that had another path before 0.2, for the error of a program that imports one by that.

``streams`` loads this when such an import fails: those that succeed pay nothing. Only an import fails with it.
``importlib.util.find_spec`` and what else looks for a module get the answer that there is none.
"""

from __future__ import annotations

from importlib import import_module
from types import FrameType
from typing import Final

GONE: Final = {
    "streams.clients": "in the folders of streams.kafka",
    "streams.clients.producing": "in streams.kafka.wire and streams.kafka.writing",
}
"""Folders without a successor of their own, and where their modules are."""

MOVED: Final = {
    ("streams", "streams.model"): "answers group loading round_trips shortcuts topics topology tracing",
    ("streams", "streams.settings"): "config config_groups=groups job_settings=jobs settings_sources=sources",
    ("streams", "streams.source"): "async_batcher async_jobs=jobs batch_producer event_producer event_source "
    "handlers=registering interjecting=event_source joins lookups postgres_sink visits",
    ("streams", "streams.views"): "global_change_log global_table",
    ("streams.cli", "streams.looks"): "group_folders group_live letter_choice letters records scans "
    "transaction=committing",
    ("streams.cli", "streams.cli"): "transactions=txn",
    ("streams.clients", "streams.kafka"): "connection permissions settings translate",
    ("streams.clients", "streams.kafka.group"): "group_coordinator=membership "
    "librdkafka_connect=broker_membership librdkafka_group=broker_group librdkafka_membership=broker_membership "
    "membership status_board",
    ("streams.clients", "streams.kafka.questions"): "admin cluster_view group_checks group_view hanging_transactions "
    "lags open_transactions questions=asking raw_log takeover trimming",
    ("streams.clients", "streams.kafka.reading"): "accepting consumer reader received",
    ("streams.clients", "streams.kafka.wire"): "group_wire=group_bytes",
    ("streams.clients", "streams.kafka.writing"): "plain_producer sending",
    ("streams.clients.producing", "streams.kafka.wire"): "answers broker_connection=connection cluster compression "
    "messages placement protocol settings",
    ("streams.clients.producing", "streams.kafka.writing"): "blocking encoded_transaction forwarding last_transaction "
    "made_batch offsets record_batch row_encoder rows transactions=slot",
    ("streams.queries", "streams.runtime.queries"): "copies local points questions",
    ("streams.runtime", "streams.runtime"): "looks=read_proofs",
    ("streams.runtime.keeping", "streams.runtime.keeping.folders"): "entries folder place=parents shelf",
    ("streams.runtime.keeping", "streams.runtime.keeping.snapshots"): "snapshotting",
    ("streams.spark.writing", "streams.spark.writing"): "transaction=sink_transaction",
    ("streams.web", "streams.web"): "group_look=group_client",
}
"""Modules by their old folder and their new one; ``=``: the new name, where it is another."""

FEATURES: Final = ("streams.settings", "streams.source", "streams.views")
"""Packages that export names of these modules."""

_IMPORT: Final = "_find_and_load_unlocked"
"""The function of importlib that an import has called, in Python 3.11, 3.12 and 3.13."""


def new_path(old: str) -> str:
    """Return where the module of an old path is; empty: it has not moved, or never was."""
    for (folder, now), names in MOVED.items():
        for each in names.split():
            name, _, renamed = each.partition("=")
            if old == f"{folder}.{name}":
                return f"{now}.{renamed or name}"
    return ""


def explained(old: str) -> str:
    """Describe in a sentence where an old path is now; empty for another path."""
    if old in GONE:
        return f"the modules of {old} are {GONE[old]} since 0.2; they are internal, and may move again"
    now = new_path(old)
    if not now:
        return ""
    for package in FEATURES:
        homes = import_module(package).__dict__["__getattr__"].homes
        names = sorted(name for name, home in homes.items() if home == now)
        if names:
            shortest = "streams" if set(names) <= {*import_module("streams").__all__} else package
            return f"{old} is {now} since 0.2; write: from {shortest} import {', '.join(names)}"
    return f"{old} is {now} since 0.2; it is internal, and may move again"


def refuse(name: str, frame: FrameType) -> None:
    """Raise ``ModuleNotFoundError`` for the import of an old path. ``frame``: the call of the finder, by importlib."""
    caller = frame.f_back
    if caller is None or caller.f_code.co_name != _IMPORT:
        return  # a question
    wanted = name
    while caller is not None and caller.f_code.co_filename == frame.f_code.co_filename:
        if caller.f_code.co_name == _IMPORT:  # the import of a module first imports its folder, from here
            wanted = caller.f_locals.get("name", wanted)
        caller = caller.f_back
    if text := explained(wanted) or explained(name):
        raise ModuleNotFoundError(text)  # without ``name``: ``from streams import OLD`` would drop it, and the text
