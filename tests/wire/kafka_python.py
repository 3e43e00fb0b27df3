"""Messages of kafka-python, by which ours are proven. Its import warns of its own use of ``importlib.resources``."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka.protocol.admin import DeleteRecordsRequest as DeleteRecordsRequest
    from kafka.protocol.admin.cluster import DescribeLogDirsRequest as DescribeLogDirsRequest
    from kafka.protocol.admin.transactions import DescribeTransactionsRequest as DescribeTransactionsRequest
    from kafka.protocol.admin.transactions import ListTransactionsRequest as ListTransactionsRequest
    from kafka.protocol.consumer import HeartbeatRequest as HeartbeatRequest
    from kafka.protocol.consumer import JoinGroupRequest as JoinGroupRequest
    from kafka.protocol.consumer import LeaveGroupRequest as LeaveGroupRequest
    from kafka.protocol.consumer import ListOffsetsRequest as ListOffsetsRequest
    from kafka.protocol.consumer import OffsetCommitRequest as OffsetCommitRequest
    from kafka.protocol.consumer import OffsetFetchRequest as OffsetFetchRequest
    from kafka.protocol.consumer import SyncGroupRequest as SyncGroupRequest
    from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment as ConsumerProtocolAssignment
    from kafka.protocol.consumer.metadata import ConsumerProtocolSubscription as ConsumerProtocolSubscription
    from kafka.protocol.metadata import FindCoordinatorRequest as FindCoordinatorRequest
    from kafka.protocol.metadata import MetadataRequest as MetadataRequest
    from kafka.protocol.producer.transaction import InitProducerIdRequest as InitProducerIdRequest
