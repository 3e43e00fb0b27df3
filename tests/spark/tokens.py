"""A callback for tokens by its name, as the option ``tokenCallback`` has it: ``tests.spark.tokens:alice``."""

from __future__ import annotations

from typing import Any

from streams.broker.security import UnsecuredToken
from streams.kafka.writing.forwarding import settings_of

alice = UnsecuredToken("alice")
not_a_function = "alice"


def signing_in(kafka: Any) -> str:
    """Return the token that the own wire signs in by."""
    credentials = settings_of(kafka, "x").security.sasl
    assert credentials is not None
    assert credentials.fetch_token is not None
    return credentials.fetch_token().value
