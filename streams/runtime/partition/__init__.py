"""One partition at work: its task, its handlers and all that they change."""
