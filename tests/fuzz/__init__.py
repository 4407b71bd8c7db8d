"""Hostile input: whatever others may have made is read within bounds, and ends in a value or in one line."""
