"""What a larger load, shape or number of processes costs: ``make bench ARGS="curve cost workers idle"``."""
