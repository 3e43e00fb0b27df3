"""Work of events ahead of their turn: jobs, batches, producers and concurrent handlers."""
