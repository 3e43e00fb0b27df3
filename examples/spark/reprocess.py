"""A changed handler over history: what would it have sent, and what would the accounts hold?

    python -m examples.spark.reprocess                     compare only; nothing is written
    python -m examples.spark.reprocess --publish bonus-1   fill bank-balances-2, and give the changed source its stores
    kes run examples.spark.reprocess:source                which goes on from there

The bank thinks about a bonus: one percent on deposits of 90.00 and more. First the handlers as they are go over the
history, and must give what production has sent: else the comparison after it would mean nothing. Then the changed ones
do, and every difference is the bonus's.
"""

from __future__ import annotations

import pyspark.sql.functions as f
from pyspark.sql import DataFrame, SparkSession

import streams.spark as kes_spark
from examples.bank import Account, Balance, Deposited
from examples.spark.common import command_line, read
from examples.spark.reconcile import CHANGELOG, positions
from examples.topics import create_topics
from streams import EventContext, EventSource, EventSourceConfig, Table

EVENTS, BALANCES, NEW_BALANCES = "bank-events", "bank-balances", "bank-balances-2"

source = EventSource(
    EventSourceConfig(group_id="bank-2", topic=EVENTS, num_partitions=10),
    store=Table.factory(key=str, value=Account),
)


@source.on
def on_deposited(ctx: EventContext[Table[str, Account]], event: Deposited) -> None:
    account = ctx.store.get(event.account) or Account()
    account.cents += event.cents + (event.cents // 100 if event.cents >= 9_000 else 0)
    ctx.store.put(event.account, account)
    ctx.forward(NEW_BALANCES, Balance(event.account, account.cents), key=event.account)


def handled(spark: SparkSession, servers: str) -> DataFrame:
    """The events that production has handled, by its own word: none of those that are still to come."""
    with kes_spark.changelog_state(read(spark, servers, CHANGELOG)) as state:
        return kes_spark.as_of(read(spark, servers, EVENTS), offsets=positions(state))


def check_production(history: DataFrame, balances: DataFrame) -> kes_spark.Comparison:
    """What production has sent, against its own handlers over the same events."""
    with kes_spark.replay("examples.bank:source", history, interjections="ignore") as replayed:
        return kes_spark.compare(balances, replayed.outputs)


def changed(history: DataFrame) -> kes_spark.Replay:
    """The changed handlers over the same events."""
    return kes_spark.replay("examples.spark.reprocess:source", history)


def against_production(balances: DataFrame, replayed: kes_spark.Replay) -> kes_spark.Comparison:
    """Every balance that would have been another one. (The topic's name is no difference.)"""
    return kes_spark.compare(balances, replayed.outputs.withColumn("topic", f.lit(BALANCES)))


def publish(servers: str, replayed: kes_spark.Replay, write_id: str) -> kes_spark.WriteResult:
    """What the changed handlers send, into the new topic, once."""
    create_topics(servers, {NEW_BALANCES: 10})
    return kes_spark.write(replayed.outputs.drop("cause"), topic=NEW_BALANCES, write_id=write_id, servers=servers)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--publish", metavar="NAME", help="write the new balances, once under this name")
    given = parser.parse_args()
    spark = kes_spark.local_session("reprocess")
    try:
        run(spark, given.servers, given.publish)
    finally:
        spark.stop()


def run(spark: SparkSession, servers: str, name: str | None) -> None:
    """Compare, and publish under ``name`` if there is one. Stop production first: what it sends meanwhile would be in
    one side only."""
    history = handled(spark, servers)
    balances = read(spark, servers, BALANCES)
    with check_production(history, balances) as found:
        print(f"production against its own handlers: {found}")
        if not found.is_equal:
            found.differences.show(truncate=False)
            raise SystemExit(1)
    with changed(history) as replayed, against_production(balances, replayed) as found:
        print(f"production against the changed handlers: {found}")
        found.differences.show(truncate=False)
        if name is not None:
            result = publish(servers, replayed, name)
            print(f"{result.rows:,} balances in {NEW_BALANCES}{'' if result.written else ', since an earlier run'}")
            begun = kes_spark.bootstrap("examples.spark.reprocess:source", replayed)
            print(f"{begun.keys:,} accounts in the stores of {source.config.group_id}")


if __name__ == "__main__":
    main()
