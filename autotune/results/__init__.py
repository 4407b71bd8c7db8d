"""Rows: how they are kept, read and checked, and the winners and scores that follow from them."""
