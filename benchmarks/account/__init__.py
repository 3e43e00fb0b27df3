"""Measures of the account workload: drain and latency."""
