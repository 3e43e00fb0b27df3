"""Rights that a principal needs in a cluster with ACLs, and the words for one that is missing."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from streams.model.group import instance_of

TOPIC: Final = "topic"
GROUP: Final = "group"
TRANSACTIONAL_ID: Final = "transactional-id"
CLUSTER: Final = "cluster"

_KINDS: Final = {
    "TOPIC_AUTHORIZATION_FAILED": TOPIC,
    "GROUP_AUTHORIZATION_FAILED": GROUP,
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": TRANSACTIONAL_ID,
    "CLUSTER_AUTHORIZATION_FAILED": CLUSTER,
}


class Right(NamedTuple):
    """One right: the operation as ``kafka-acls`` writes it (``Read``), a kind of resource (``topic``) and its name.
    ``prefixed``: all resources whose names begin with it. The cluster has no name."""

    operation: str
    kind: str
    name: str = ""
    prefixed: bool = False

    def __str__(self) -> str:
        which = f"{self.kind}s that begin with" if self.prefixed else self.kind
        return f"{self.operation} on {which} {self.name}".rstrip().replace("on cluster", "on the cluster")

    @property
    def command(self) -> str:
        """The command that grants it, but for address and name of the principal."""
        named = f" {shlex.quote(self.name)}" if self.name else ""
        pattern = " --resource-pattern-type prefixed" if self.prefixed else ""
        return (
            f"kafka-acls --bootstrap-server ADDRESS --add --allow-principal User:NAME --operation {self.operation} "
            f"--{self.kind}{named}{pattern}"
        )


def on_topic(operation: str, name: str) -> Right:
    """Make a right on one topic."""
    return Right(operation, TOPIC, name)


def on_group(operation: str, name: str) -> Right:
    """Make a right on one consumer group."""
    return Right(operation, GROUP, name)


def on_transactional_id(operation: str, name: str) -> Right:
    """Make a right on one transactional id."""
    return Right(operation, TRANSACTIONAL_ID, name)


def on_cluster(operation: str) -> Right:
    """Make a right on the cluster itself."""
    return Right(operation, CLUSTER)


def of_transaction(transactional_id: str, group_id: str, topics: Iterable[str] = ()) -> list[Right]:
    """Return the rights that a transaction takes, those to write aside. ``topics``: whose offsets it sends."""
    own = on_transactional_id("Write", transactional_id)
    if instance_of(group_id, transactional_id):  # one of many, of all instances
        own = own._replace(name=f"{group_id}.", prefixed=True)
    return [own, on_group("Read", group_id), *(on_topic("Read", topic) for topic in topics)]


def denied(code: str, needed: Sequence[Right] = ()) -> str:
    """Explain a refusal by its name in the protocol; ``needed``: what the request takes, of any kind."""
    kind = _KINDS.get(code, "resource")
    right = next((right for right in needed if right.kind == kind), None)
    if right is None:
        return f"not authorised ({code}); the principal needs a right on the {kind} in the cluster's ACLs"
    wider = " (Read, Write and others include it)" if right.operation == "Describe" and kind != CLUSTER else ""
    return f"not authorised ({code}); the principal needs {right}{wider}: {right.command}"


def is_denial(code: str) -> bool:
    """Check whether this name of an error in the protocol is that of a missing right."""
    return code in _KINDS
