"""The cost of several inputs, joined tables and the loop, compared with other toolkits."""
