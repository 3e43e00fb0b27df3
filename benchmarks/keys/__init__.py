"""Parked keys and durable jobs: their price, and how fast they are worked off."""
