"""The vocabulary of the toolkit that users do not import by path: groups, topics, topologies, statistics, answers."""
