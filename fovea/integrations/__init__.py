"""Fovea on the platforms of others: one file for each, which imports its package."""
