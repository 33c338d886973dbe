"""Tests of services/kvstore."""
