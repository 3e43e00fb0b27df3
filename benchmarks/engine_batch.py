"""The same work by ``EventSource`` with a batch handler, which does for each event of a list what a plain one does.

Options as for ``benchmarks.engine``.
"""

from __future__ import annotations

from benchmarks.engine import main, without_handlers
from benchmarks.workload import Account, Balance, Deposited, Job, kinds
from streams import BatchContext, EventSource, Table


def source_of(job: Job) -> EventSource[Table[str, Account]]:
    """The event source of the account workload."""
    source, output = without_handlers(job), job.output

    def deposited(ctx: BatchContext[Table[str, Account]], events: list[Deposited]) -> None:
        get, put, forward = ctx.store.get, ctx.store.put, ctx.forward
        for event in events:
            key = event.account
            account = get(key) or Account()
            account.count += 1
            account.cents += event.cents
            put(key, account)
            forward(output, Balance(key, account.count, account.cents, event.sent), key=key)

    for kind in kinds(job.shape.types):
        source.register_event_type(kind, deposited, batch=True)
    return source


if __name__ == "__main__":
    main(source_of)
