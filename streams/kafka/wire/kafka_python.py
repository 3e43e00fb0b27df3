"""Everything that is used of kafka-python, in one list: the surface that our pin of its version protects.

It ships no types, so all of it is ``Any`` here, and is given a type where it enters. Its import warns of its own use of
``importlib.resources`` (Python 3.11 and 3.12), which would end the tests of an application that has warnings as errors.
"""

from __future__ import annotations

import struct
import warnings
from importlib import import_module
from typing import Any, Final


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

    # Generated from Kafka's own message definitions, and the class that generates.
    ApiMessage: Any = _from("protocol.api_message", "ApiMessage")
    AddOffsetsToTxnRequest: Any = _from("protocol.producer", "AddOffsetsToTxnRequest")
    AddPartitionsToTxnRequest: Any = _from("protocol.producer", "AddPartitionsToTxnRequest")
    ApiKey: Any = _from("protocol.api_key", "ApiKey")
    ApiVersionsRequest: Any = _from("protocol.metadata", "ApiVersionsRequest")
    ConsumerProtocolAssignment: Any = _from("protocol.consumer.metadata", "ConsumerProtocolAssignment")
    ConsumerProtocolSubscription: Any = _from("protocol.consumer.metadata", "ConsumerProtocolSubscription")
    DeleteRecordsRequest: Any = _from("protocol.admin", "DeleteRecordsRequest")
    DescribeClusterResponse: Any = _from("protocol.admin", "DescribeClusterResponse")
    DescribeQuorumRequest: Any = _from("protocol.admin", "DescribeQuorumRequest")
    DescribeQuorumResponse: Any = _from("protocol.admin", "DescribeQuorumResponse")
    DescribeLogDirsRequest: Any = _from("protocol.admin.cluster", "DescribeLogDirsRequest")
    DescribeConfigsRequest: Any = _from("protocol.admin.configs", "DescribeConfigsRequest")
    DescribeProducersRequest: Any = _from("protocol.admin.transactions", "DescribeProducersRequest")
    DescribeTransactionsRequest: Any = _from("protocol.admin.transactions", "DescribeTransactionsRequest")
    DescribeGroupsRequest: Any = _from("protocol.admin.groups", "DescribeGroupsRequest")
    EndTxnRequest: Any = _from("protocol.producer", "EndTxnRequest")
    FetchRequest: Any = _from("protocol.consumer", "FetchRequest")
    FetchResponse: Any = _from("protocol.consumer", "FetchResponse")
    FindCoordinatorRequest: Any = _from("protocol.metadata", "FindCoordinatorRequest")
    FindCoordinatorResponse: Any = _from("protocol.metadata", "FindCoordinatorResponse")
    HeartbeatRequest: Any = _from("protocol.consumer", "HeartbeatRequest")
    InitProducerIdRequest: Any = _from("protocol.producer.transaction", "InitProducerIdRequest")
    JoinGroupRequest: Any = _from("protocol.consumer", "JoinGroupRequest")
    LeaveGroupRequest: Any = _from("protocol.consumer", "LeaveGroupRequest")
    ListOffsetsRequest: Any = _from("protocol.consumer", "ListOffsetsRequest")
    ListTransactionsRequest: Any = _from("protocol.admin.transactions", "ListTransactionsRequest")
    MetadataRequest: Any = _from("protocol.metadata", "MetadataRequest")
    MetadataResponse: Any = _from("protocol.metadata", "MetadataResponse")
    ProduceRequest: Any = _from("protocol.producer", "ProduceRequest")
    ProduceResponse: Any = _from("protocol.producer", "ProduceResponse")
    SaslAuthenticateRequest: Any = _from("protocol.sasl", "SaslAuthenticateRequest")
    SaslHandshakeRequest: Any = _from("protocol.sasl", "SaslHandshakeRequest")
    SyncGroupRequest: Any = _from("protocol.consumer", "SyncGroupRequest")
    TxnOffsetCommitRequest: Any = _from("protocol.producer", "TxnOffsetCommitRequest")
    WriteTxnMarkersRequest: Any = _from("protocol.producer.transaction", "WriteTxnMarkersRequest")
    DeleteGroupsRequest: Any = _from("protocol.admin.groups", "DeleteGroupsRequest")
    OffsetCommitRequest: Any = _from("protocol.consumer", "OffsetCommitRequest")
    OffsetDeleteRequest: Any = _from("protocol.consumer.group", "OffsetDeleteRequest")
    OffsetFetchRequest: Any = _from("protocol.consumer", "OffsetFetchRequest")

MALFORMED: Final = (struct.error, IndexError, ValueError, TypeError, OverflowError)
"""Raised by kafka-python for bytes that end too early, or that are of another layout."""
