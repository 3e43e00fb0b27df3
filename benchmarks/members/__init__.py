"""What a member costs and how it answers at the edges: idle, on several brokers, when the broker refuses a record."""
