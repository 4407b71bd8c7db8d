"""Find and publish block sizes for ragged paged attention on TPUs."""

__version__ = "0.1.0"
