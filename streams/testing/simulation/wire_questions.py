"""The questions of a take-over that leaders and transaction coordinators of the simulated broker answer, in bytes."""

from __future__ import annotations

from typing import Any, Final

from streams.testing.simulation.broker import Broker, Log, Txn
from streams.testing.simulation.faults import Strike
from streams.testing.simulation.wire_broker import Answer, WireBroker
from streams.testing.simulation.wire_requests import Request

_LATEST, _EARLIEST = -1, -2  # in the place of a time
_BYTES_A_RECORD: Final = 100
_NOT_COORDINATOR, _NO_SUCH_ID, _OUT_OF_RANGE, _UNKNOWN_TIME = 16, 105, 1, 35
_OF_THE_COORDINATOR: Final = {None: "Ongoing", True: "PrepareCommit", False: "PrepareAbort"}
_COMPLETE: Final = {None: "Empty", True: "CompleteCommit", False: "CompleteAbort"}


class WireQuestions:
    """Offsets and times of logs, deletion and sizes of records, open transactions and their producers."""

    def __init__(self, wire: WireBroker) -> None:
        self._wire = wire
        self._broker: Broker = wire.broker
        wire.serve(
            {
                "ListOffsets": self._list_offsets,
                "DeleteRecords": self._delete_records,
                "DescribeLogDirs": self._log_dirs,
                "ListTransactions": self._list_transactions,
                "DescribeTransactions": self._describe_transactions,
                "DescribeProducers": self._describe_producers,
            }
        )

    # -- leaders -------------------------------------------------------------------------------------------------------

    def _list_offsets(self, node: int, request: Request, strike: Strike | None) -> Answer:
        of = request.answer_class.ListOffsetsTopicResponse
        is_stable = bool(getattr(request.body, "isolation_level", 0))
        topics = []
        for topic in request.body.topics:
            partitions = []
            for part in topic.partitions:
                code, offset, timestamp = self._wire.not_led(topic.name, part.partition_index, node, strike), -1, -1
                strike = None
                if not code:
                    log = self._broker.log(topic.name, part.partition_index)
                    code, offset, timestamp = _offset(log, part.timestamp, is_stable)
                partitions.append(
                    of.ListOffsetsPartitionResponse(
                        partition_index=part.partition_index,
                        error_code=code,
                        timestamp=timestamp,
                        offset=offset,
                        leader_epoch=-1 if code else 0,
                    )
                )
            topics.append(of(name=topic.name, partitions=partitions))
        return request.encoded(topics=topics)

    def _delete_records(self, node: int, request: Request, strike: Strike | None) -> Answer:
        of = request.answer_class.DeleteRecordsTopicResult
        topics = []
        for topic in request.body.topics:
            partitions = []
            for part in topic.partitions:
                code, low = self._wire.not_led(topic.name, part.partition_index, node, strike), -1
                strike = None
                if not code:
                    log = self._broker.log(topic.name, part.partition_index)
                    code, low = _cut(log, part.offset)
                partitions.append(
                    of.DeleteRecordsPartitionResult(
                        partition_index=part.partition_index, low_watermark=low, error_code=code
                    )
                )
            topics.append(of(name=topic.name, partitions=partitions))
        return request.encoded(topics=topics)

    def _log_dirs(self, node: int, request: Request, strike: Strike | None) -> Answer:
        """Each node has what it leads, and nothing else."""
        of = request.answer_class.DescribeLogDirsResult
        topics = []
        for topic in request.body.topics:
            partitions = [
                of.DescribeLogDirsTopic.DescribeLogDirsPartition(
                    partition_index=number,
                    partition_size=_BYTES_A_RECORD * self._broker.log(topic.topic, number).end,
                    offset_lag=0,
                    is_future_key=False,
                )
                for number in topic.partitions
                if not self._wire.not_led(topic.topic, number, node, None)
            ]
            topics.append(of.DescribeLogDirsTopic(name=topic.topic, partitions=partitions))
        return request.encoded(error_code=0, results=[of(error_code=0, log_dir="/simulated", topics=topics)])

    def _describe_producers(self, node: int, request: Request, strike: Strike | None) -> Answer:
        of = request.answer_class.TopicResponse
        topics = []
        for topic in request.body.topics:
            partitions = []
            for number in topic.partition_indexes:
                code = self._wire.not_led(topic.name, number, node, strike)
                strike = None
                producers = [] if code else self._producers(of.PartitionResponse.ProducerState, topic.name, number)
                partitions.append(
                    of.PartitionResponse(partition_index=number, error_code=code, active_producers=producers)
                )
            topics.append(of(name=topic.name, partitions=partitions))
        return request.encoded(topics=topics)

    def _producers(self, of: Any, topic: str, partition: int) -> list[Any]:
        log = self._broker.log(topic, partition)
        begun = {txn.name.rpartition("#")[0]: start for txn, start in log.open.items()}
        newest = {
            entry.txn.name.rpartition("#")[0]: entry.timestamp_ms for entry in log.entries if entry.txn is not None
        }
        return [
            of(
                producer_id=producer_id,
                producer_epoch=epoch,
                last_sequence=sequence,
                last_timestamp=newest.get(name, -1),
                coordinator_epoch=0,
                current_txn_start_offset=begun.get(name, -1),
            )
            for name, producer_id, epoch, sequence in self._wire.producers(topic, partition)
        ]

    # -- coordinators of transactions ----------------------------------------------------------------------------------

    def _list_transactions(self, node: int, request: Request, strike: Strike | None) -> Answer:
        body, of = request.body, request.answer_class.TransactionState
        states = []
        for name in self._broker.ids:
            state, producer_id, _ = self._transaction(name)
            wanted = not body.state_filters or state in body.state_filters
            by_producer = not body.producer_id_filters or producer_id in body.producer_id_filters
            if wanted and by_producer and self._wire.node_of(name) == node:
                states.append(of(transactional_id=name, producer_id=producer_id, transaction_state=state))
        known = {*_OF_THE_COORDINATOR.values(), *_COMPLETE.values(), "Dead", "PrepareEpochFence"}
        unknown = [name for name in body.state_filters if name not in known]
        return request.encoded(error_code=0, unknown_state_filters=unknown, transaction_states=states)

    def _describe_transactions(self, node: int, request: Request, strike: Strike | None) -> Answer:
        of = request.answer_class.TransactionState
        states = []
        for name in request.body.transactional_ids:
            fields: dict[str, Any] = {
                "transaction_state": "",
                "transaction_timeout_ms": -1,
                "transaction_start_time_ms": -1,
                "producer_id": -1,
                "producer_epoch": -1,
                "topics": [],
            }
            code = self._wire.not_here(name, node, strike)
            if not code and name not in self._broker.ids:
                code = _NO_SUCH_ID
            if not code:
                state, producer_id, epoch = self._transaction(name)
                known = self._broker.ids[name]
                fields |= {
                    "transaction_state": state,
                    "transaction_timeout_ms": int(known.timeout * 1000),
                    "producer_id": producer_id,
                    "producer_epoch": epoch,
                    "topics": [] if known.txn is None else _places(of.TopicData, known.txn),
                }
            states.append(of(error_code=code, transactional_id=name, **fields))
        return request.encoded(transaction_states=states)

    def _transaction(self, name: str) -> tuple[str, int, int]:
        """Return state, producer id and epoch of a transactional id."""
        known = self._broker.ids[name]
        state = _COMPLETE[known.last] if known.txn is None else _OF_THE_COORDINATOR[known.txn.outcome]
        return (state, *self._wire.on_the_wire(name, known.epoch))


def _offset(log: Log, timestamp: int, is_stable: bool) -> tuple[int, int, int]:
    """Find the offset of a time: its code, it, and its timestamp. Markers have a time too, as in a real log."""
    end = log.stable if is_stable else log.end
    if timestamp == _EARLIEST:
        return 0, log.start, -1
    if timestamp == _LATEST:
        return 0, end, -1
    if timestamp < 0:
        return _UNKNOWN_TIME, -1, -1
    for offset in range(log.start, end):
        entry = log.entries[offset]
        if not entry.gone and entry.timestamp_ms >= timestamp:
            return 0, offset, entry.timestamp_ms
    return 0, -1, -1


def _cut(log: Log, offset: int) -> tuple[int, int]:
    """Delete what is below an offset (-1: everything): the code, and the new start."""
    if offset > log.end or offset < -1:
        return _OUT_OF_RANGE, -1
    log.start = max(log.start, log.end if offset < 0 else offset)
    return 0, log.start


def _places(of: Any, txn: Txn) -> list[Any]:
    by_topic: dict[str, list[int]] = {}
    for log in txn.logs:
        by_topic.setdefault(log.topic, []).append(log.partition)
    return [of(topic=topic, partitions=numbers) for topic, numbers in by_topic.items()]
