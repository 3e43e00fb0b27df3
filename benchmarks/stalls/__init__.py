"""How long readers wait when members come, go, die and freeze: ``make bench ARGS=stalls``."""
