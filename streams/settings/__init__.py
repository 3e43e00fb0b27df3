"""Settings: their groups, the sources that they are read from, and those of jobs."""
