"""The tasks of an event source and the threads they own. Read it top down: ``engine`` starts everything else."""
