"""A declarative pipeline of Spark around an event source, killed in each of its stages: ``make pipeline``."""

from __future__ import annotations
