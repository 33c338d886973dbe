"""The status page in a real browser; `make test-browser`."""
