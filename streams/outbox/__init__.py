"""The outbox: rows of PostgreSQL in Kafka exactly once, in the order of their keys.

``stash`` writes a row in the user's SQL transaction, ``schema`` has the tables, ``postgres`` is the relay's session of
the database, ``shard`` moves the rows of one shard, ``relay`` runs a thread for each.
"""
