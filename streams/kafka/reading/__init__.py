"""Records on their way from the broker."""
