"""How fast typed events are produced, beside a loop by hand over the client."""
