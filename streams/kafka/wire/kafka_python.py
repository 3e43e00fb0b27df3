"""Everything that is used of kafka-python, in one list: the surface that our pin of its version protects.

It ships no types, so all of it is ``Any`` here, and is given a type where it enters. Its import warns of its own use of
``importlib.resources`` (Python 3.11 and 3.12), which would end the tests of an application that has warnings as errors.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any


def _from(module: str, name: str) -> Any:
    return getattr(import_module(f"kafka.{module}"), name)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    errors: Any = import_module("kafka.errors")

    # The documented extension point: a coordinator client, and the event loop that it lives on.
    BaseCoordinator: Any = _from("coordinator.base", "BaseCoordinator")
    UNKNOWN_MEMBER_ID: str = _from("protocol.consumer", "UNKNOWN_MEMBER_ID")
    KafkaNetClient: Any = _from("net.compat", "KafkaNetClient")
    KafkaConnectionManager: Any = _from("net.manager", "KafkaConnectionManager")
    KafkaNetSocket: Any = _from("net.inet", "KafkaNetSocket")
    create_connection: Any = _from("net.inet", "create_connection")
    KafkaSSLTransport: Any = _from("net.transport", "KafkaSSLTransport")
    NetworkSelector: Any = _from("net.selector", "NetworkSelector")
    WakeupNotifier: Any = _from("net.wakeup_notifier", "WakeupNotifier")
    AbstractTokenProvider: Any = _from("net.sasl.oauth", "AbstractTokenProvider")

    # Batches of records, as a test's broker reads them.
    MemoryRecords: Any = _from("record", "MemoryRecords")

    # Messages, generated from Kafka's own definitions.
    FindCoordinatorRequest: Any = _from("protocol.metadata", "FindCoordinatorRequest")
    LeaveGroupRequest: Any = _from("protocol.consumer", "LeaveGroupRequest")
