"""Rows as events: columns of event classes, decoded and encoded."""
