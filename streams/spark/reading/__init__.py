"""Reading of Kafka's topics: the plan of positions, and the tasks that read ranges."""
