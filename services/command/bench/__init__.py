"""`hotset bench`: what a running server does under a number of streams."""
