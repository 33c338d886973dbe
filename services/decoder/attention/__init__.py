"""Sparse decode attention: selectors, and the heart that runs them over a residence.

Knows queries, keys and values of one layer at a time; not which model they came from.
"""
