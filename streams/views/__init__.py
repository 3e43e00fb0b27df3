"""Views: compacted topics, and the state of event sources, as tables that any process may read."""
