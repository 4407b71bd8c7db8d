"""Timing on a device: one process a chip, told what to run by its parent."""
