"""JAX's ragged paged attention kernel: its call, key, inputs and reference."""
