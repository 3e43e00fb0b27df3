"""State on disk: the folders of a partition, which one is used, and what a folder holds."""
