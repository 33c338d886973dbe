"""Tests of the hotset command."""
