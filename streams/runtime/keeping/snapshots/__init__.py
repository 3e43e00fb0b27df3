"""Snapshots of folders in an object store: what one consists of, how it is made and loaded."""
