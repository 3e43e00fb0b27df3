# The types of forward stand in its annotations.
