"""The partitions of a member: take-over, replicas, hand-over and restarts. ``core`` decides which member gets one.

``tenure`` and ``candidate`` are not of the engine: elections, journals and relays of an outbox stand on them.
"""
