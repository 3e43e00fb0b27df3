"""Parked keys, durable jobs, ids of events that count once: their price, and how fast queues are worked off."""
