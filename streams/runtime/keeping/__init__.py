"""State on disk: folders of partitions, and the thread that writes them beside the engine."""
