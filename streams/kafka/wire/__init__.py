"""Connections to brokers, their messages, and the bytes of the group protocol."""
