"""Measurements behind the numbers in the documentation, one command per table."""
