"""Recipes for Spark, each a file to read and to run: ``python -m examples.spark.<name> --help``."""

from __future__ import annotations
