"""The account workload in other people's engines, as systems of the same measures, judged by the same judge."""
