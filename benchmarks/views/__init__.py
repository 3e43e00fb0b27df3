"""Views: how fast they catch up, and how far they are behind."""
