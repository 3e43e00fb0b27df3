"""Parked keys: their price, and how fast they are worked off."""
