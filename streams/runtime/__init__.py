"""The tasks of an event source and the threads they own. Reads top down: ``lifecycle`` starts everything else."""
