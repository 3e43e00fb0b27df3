"""Records on their way to the broker, in transactions and outside of them."""
