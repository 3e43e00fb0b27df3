"""Writing to Kafka, exactly once: record batches in the tasks, one transaction in the driver."""
