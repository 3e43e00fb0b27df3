"""What the user says about the cluster, as configurations of librdkafka's clients."""

from __future__ import annotations

from collections.abc import Mapping


class ClientSettings:
    """Built once per event source; a value that any thread may use. ``repr`` masks secrets."""

    def __init__(
        self,
        bootstrap_servers: str,
        overrides: Mapping[str, object] | None = None,
        *,
        client_id: str = "kes",
        group_id: str = "",
    ) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.overrides = dict(overrides or {})
        self.client_id = client_id
        self.group_id = group_id

    def producer(self, transactional_id: str, transaction_timeout_ms: int) -> dict[str, object]:
        """Configuration of a transactional producer."""
        raise NotImplementedError

    def consumer(self, *, partition_eof: bool, fetch_wait_ms: int = 20) -> dict[str, object]:
        """Configuration of a consumer with manual assignment, ``read_committed``."""
        raise NotImplementedError

    def admin(self) -> dict[str, object]:
        """Configuration of an admin client."""
        raise NotImplementedError
