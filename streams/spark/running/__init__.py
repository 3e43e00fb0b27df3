"""Pipelines that stay up: restarts, the stop between two batches, metrics and probes."""
