"""Clients that others wrote, installed as their users install them, against a live server."""
