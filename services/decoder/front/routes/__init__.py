"""One file a family of routes; each offers `add_routes(app)`."""
