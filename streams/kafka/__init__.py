"""Everything that talks to Kafka. Tasks and decisions are elsewhere.

``wire``: connections and messages; ``reading`` and ``writing``: records; ``questions``: what a cluster is asked;
``group``: membership. Each room imports only those that are named before it.
"""
