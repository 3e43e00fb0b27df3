"""The transaction pool, its producers and the recovery of a failed transaction."""
