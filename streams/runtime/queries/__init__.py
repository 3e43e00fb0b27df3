"""Queries inside the process of a partition's owner: the committed state, with a proof of ownership."""
