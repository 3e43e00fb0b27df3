"""The price of a member that has nothing to do."""
