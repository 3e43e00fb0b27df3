"""Decisions only: no I/O, no clock, no threads, no await. Time is an argument."""
