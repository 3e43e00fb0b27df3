"""A callback for tokens by its name, as the option ``tokenCallback`` has it: ``tests.spark.tokens:alice``."""

from __future__ import annotations

from streams.broker.security import UnsecuredToken

alice = UnsecuredToken("alice")
not_a_function = "alice"
