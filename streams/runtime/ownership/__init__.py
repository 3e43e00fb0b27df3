"""The partitions of a member: take-over, replicas, hand-over and restarts."""
