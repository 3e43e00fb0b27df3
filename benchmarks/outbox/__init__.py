"""Rows of an outbox on their way to Kafka, beside a polling loop by hand."""
