"""The house itself under test: floors, habits, make targets, launcher, compose file, documents."""
