"""The store: which host pages exist, who holds them, what they contain.

Knows neither torch nor a GPU nor any model; it stands on services/contract alone and never touches the
bytes of a page, only their headers.
"""
