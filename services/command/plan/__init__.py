"""`hotset plan`: what fits a GPU and its host, counted as the engine counts, and what a token will cost."""
