"""Measures of the account workload: drain, latency, memory."""
