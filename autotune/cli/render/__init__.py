"""Findings as text, markdown, csv and json."""
