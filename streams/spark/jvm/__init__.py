"""The tasks' half of the sink in Java, and how it is built."""
