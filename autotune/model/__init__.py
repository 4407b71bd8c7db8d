"""Predicted latency: the cost model over a schedule, its constants, and cycles of what was not compiled."""
