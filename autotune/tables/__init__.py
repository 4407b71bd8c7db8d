"""Tables of tuned block sizes, as files."""
