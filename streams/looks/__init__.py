"""What the command line and the monitor both show: groups, letters, records, and the cluster they are of."""
