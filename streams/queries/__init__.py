"""Queries: the committed state of a running event source, with a proof of how current it is."""
