"""Several inputs, joined tables and the loop: what they cost, and beside other toolkits."""
