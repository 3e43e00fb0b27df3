"""The peers: systems of every measure of the account workload."""

from __future__ import annotations

from benchmarks.peers.gkes import Gkes
from benchmarks.peers.kafka_streams import KafkaStreams
from benchmarks.peers.quix import Quixstreams

KINDS = (KafkaStreams(), Quixstreams(), Gkes())
