"""Log the state of a client's connections: once per change, never once per attempt.

librdkafka reports every failed attempt to connect, several times a second while a broker is away, both in its log
and in its error callback. Here its log becomes debug output; of the callbacks one line is logged when the cluster is
lost, and one when it is back.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException

from streams.kafka.translate import NO_SUCH_TOPIC, NOT_AUTHORIZED
from streams.kafka.wire.explaining import plain

logger = logging.getLogger(__name__)

_CHATTER: Final = frozenset(
    {"FAIL", "ERROR", "CONNFAIL", "DISCONN", "RESOLVE", "BROKERDOWN", "REQTMOUT", "CONFWARN", "TERMINATE", "GETPID"}
)
"""Facilities of librdkafka's log that repeat the error callback, or warn of a setting that only other
kinds of clients use (one set of overrides serves producers, consumers and admin clients), or report that a coordinator
is still loading (``GETPID``: the call that waits for it has its own error)."""

_STOPPED: Final = "gap-less guarantee"
"""A producer's line has this when it stopped at a refused batch, to keep its order (``writing.plain_producer``)."""
_LEADERS_SECONDS: Final = 1.0
"""Seconds for the answer of a broker; librdkafka's own timer comes after as long."""
_DOWN: Final = frozenset({KafkaError._ALL_BROKERS_DOWN, KafkaError._AUTHENTICATION, KafkaError._SSL})


class ConnectionLog:
    """The error callback and the log sink of one client. Called on the thread that polls the client."""

    def __init__(self, addresses: str, client: str) -> None:
        self.addresses = addresses
        self.client = client
        self.down = False
        self.reason = ""
        """The last complaint, for error messages. Never contains credentials (librdkafka does not log them)."""
        self.failed_at = float("-inf")
        """When that was (``time.monotonic``)."""
        self._about_topics: list[KafkaError] = []

    def on_error(self, error: KafkaError) -> None:
        """librdkafka's ``error_cb``."""
        code = error.code()
        if code in NO_SUCH_TOPIC or code in NOT_AUTHORIZED:
            self._about_topics.append(error)
            return
        # "All brokers down" says nothing that the error of a connection before it did not say better.
        is_empty = code == KafkaError._ALL_BROKERS_DOWN and self.reason
        self.on_failure(self.reason if is_empty else f"{error.name()}: {error.str()}", is_down=code in _DOWN)

    def on_failure(self, reason: str, *, is_down: bool) -> None:
        """Note a failure: the name of an error, and its words. ``is_down``: it is about the whole cluster."""
        self.failed_at = time.monotonic()
        self.reason = reason
        if is_down and not self.down:
            self.down = True
            reason = plain(self.reason, self.addresses)
            logger.warning("%s: Kafka at %s can not be reached (%s), trying on", self.client, self.addresses, reason)

    def take_topic_errors(self) -> list[KafkaError]:
        """Return the errors about topics since the last call: a missing topic is reported here, not by a message."""
        taken, self._about_topics = self._about_topics, []
        return taken

    def on_answer(self) -> None:
        """Note that a broker answered."""
        if self.down:
            self.down = False
            logger.info("%s: Kafka at %s answers again", self.client, self.addresses)

    def log(self, level: int, _format: str, facility: str, _name: str, text: str) -> None:
        """Log a line of librdkafka's own log: confluent-kafka calls this as ``logger.log``."""
        logger.log(
            logging.DEBUG if facility in _CHATTER or _STOPPED in text else min(level, logging.WARNING),
            "%s: %s %s",
            self.client,
            facility,
            text,
        )


def find_leaders(consumer: Consumer, topic: str) -> bool:
    """Fetch the leaders of a topic that the consumer was just assigned for the first time. ``False``: no broker
    answered within a second."""
    # librdkafka asks by a timer of one second: the first record came after 590 ms (median; 146 to 992), with this after
    # 1.4 ms. Before the assignment it would do as well, but what is learnt is forgotten after 15 minutes.
    try:
        consumer.list_topics(topic, _LEADERS_SECONDS)
    except KafkaException:  # then the timer does it
        return False
    return True
