"""The stores of an event source against its event log: does every account hold what was paid in?

    python -m examples.spark.reconcile

A changelog holds the state and, beside it, the input offset that the state belongs to, written in the same transaction.
So both sides are taken at one and the same point: the stores from one read of the changelog, and the events below the
offsets that this read has found. The event source may run meanwhile; an account that differs then may be one whose
transaction was under way: look again.
"""

from __future__ import annotations

import pyspark.sql.functions as f
from pyspark.sql import Row, SparkSession

import streams.spark as kes_spark
from examples.bank import Account, Deposited, source
from examples.spark.common import command_line, read

EVENTS, CHANGELOG = source.config.topic, source.config.changelog


def positions(state: kes_spark.State) -> dict[str, dict[int, int]]:
    """The input offsets up to which the stores are, by topic and partition, as the event source has noted them."""
    return {EVENTS: {row.partition: row.offset for row in state.positions.collect()}}


def differences(spark: SparkSession, servers: str) -> list[Row]:
    """Accounts whose store is not what their events add up to: account, stored, paid. None: all is well."""
    with kes_spark.changelog_state(read(spark, servers, CHANGELOG)) as state:
        accounts = state.table(key=str, value=Account)
        stored = accounts.select(f.col("key").alias("account"), f.col("value.cents").alias("stored"))
        events = kes_spark.as_of(read(spark, servers, EVENTS), offsets=positions(state))
        deposits = kes_spark.events(events, Deposited, on_error="fail")
        paid = deposits.groupBy("account").agg(f.sum("cents").alias("paid"))
        return stored.join(paid, "account", "full").where("not (stored <=> paid)").collect()


def main() -> None:
    given = command_line(__doc__).parse_args()
    spark = kes_spark.local_session("reconcile")
    try:
        wrong = differences(spark, given.servers)
        for account, stored, paid in wrong[:20]:
            print(f"{account}: the store has {stored}, its deposits are {paid}")
        print(f"{len(wrong):,} accounts differ" if wrong else "every account holds what was paid in")
    finally:
        spark.stop()
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
