"""``format("grt")`` beside Spark's own Kafka connector: reads, writes, streams and typed events in one session."""
