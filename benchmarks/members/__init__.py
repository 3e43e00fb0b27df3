"""Measures of one member: its processor time without events, its latency on three brokers, and a refused record."""
