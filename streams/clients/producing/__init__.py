"""The transactional producer that speaks Kafka's protocol itself, on the event loop."""
