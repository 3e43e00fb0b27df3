"""Everything that is used of kafka-python, in one list: its surface that our pin of its version protects.

Its import warns of its own use of ``importlib.resources`` (Python 3.11 and 3.12), which would end the tests of an
application that turns warnings into errors.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka.errors as errors
    from kafka.coordinator.base import BaseCoordinator
    from kafka.net.compat import KafkaNetClient
    from kafka.net.manager import KafkaConnectionManager
    from kafka.net.sasl.oauth import AbstractTokenProvider
    from kafka.net.selector import NetworkSelector
    from kafka.net.wakeup_notifier import WakeupNotifier
    from kafka.protocol.admin.transactions import ListTransactionsRequest
    from kafka.protocol.consumer import (
        UNKNOWN_MEMBER_ID,
        LeaveGroupRequest,
        ListOffsetsRequest,
        OffsetFetchRequest,
    )
    from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription
    from kafka.protocol.metadata import FindCoordinatorRequest, MetadataRequest
    from kafka.protocol.producer.transaction import InitProducerIdRequest

__all__ = [
    "UNKNOWN_MEMBER_ID",
    "AbstractTokenProvider",
    "BaseCoordinator",
    "ConsumerProtocolAssignment",
    "ConsumerProtocolSubscription",
    "FindCoordinatorRequest",
    "InitProducerIdRequest",
    "KafkaConnectionManager",
    "KafkaNetClient",
    "LeaveGroupRequest",
    "ListOffsetsRequest",
    "ListTransactionsRequest",
    "MetadataRequest",
    "NetworkSelector",
    "OffsetFetchRequest",
    "WakeupNotifier",
    "errors",
]
