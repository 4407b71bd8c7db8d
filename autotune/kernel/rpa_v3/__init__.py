"""Ragged paged attention v3 as tpu-inference has it: a decode and a mixed call, four block sizes each."""
