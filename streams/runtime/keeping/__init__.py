"""State on disk: folders of partitions, and the thread that writes them behind the engine's back."""
