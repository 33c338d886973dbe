"""`hotset doctor`: what this machine has, judged by what hotset needs."""
