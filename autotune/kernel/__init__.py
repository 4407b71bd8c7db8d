"""The kernel being tuned: its shapes, its batches, and JAX's implementation of it."""
