"""Blocking objects that talk to Kafka, each owned by one thread; the only importers of Kafka libraries.

Nothing is exported here: import the modules.
"""
