"""`hotset serve`: both services on this machine, from the first line of progress to a clean end."""
