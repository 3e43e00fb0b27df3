"""State on disk: folders of partitions, and the thread that writes them beside the engine.

Imports go down this list: ``on_disk``, ``keeper``, ``snapshots`` (copies of folders in a shared place),
``kept_partition``, ``folders``.
"""
