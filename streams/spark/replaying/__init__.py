"""Handlers of an event source over a DataFrame, and what can be made of it."""
