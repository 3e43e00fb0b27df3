"""Other formats and rules: their price beside JSON with our headers."""
