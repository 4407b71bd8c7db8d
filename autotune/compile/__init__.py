"""Compiles in processes that may die, and the cache of their results."""
