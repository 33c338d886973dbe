"""Tests of services/contract."""
