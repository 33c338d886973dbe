"""What both services agree on: planes, layout and headers of the arena, errors, the wire's helpers.

Knows neither torch nor a GPU, nor which of the two services it runs in.
"""
