"""How fast state comes back from the changelog, against a loop that fills a dictionary: ``make bench ARGS=restore``."""
