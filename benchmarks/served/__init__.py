"""A member that others look at: queries by HTTP, and viewers of its monitor."""
