"""The price of reading a log up to its end."""
