"""Hostile input: whatever others may have made is read within bounds, and ends in a value or in one line.

    python -m tests.fuzz --inputs 100000      # or: make fuzz

Inputs are made from real ones by a seeded mutator of our own (`mutate`): an input is known by its target,
seed and number, is the same on every machine, and so needs no corpus kept between runs. atheris, the fuzzer
guided by coverage, is built for each Python and sees nothing of what pyarrow, sqlite and jax do in C++; what
is parsed here is small enough that a dictionary of each format reaches it. hypothesis, which the other tests
use, finds short counterexamples of a property, but keeps no count of bytes and cannot outlive a crash.

Inputs run in a child (`child`) that may die, with bounds on its processor time and memory, and in which
anything that would execute code, start a program, open a connection or write a file elsewhere is a find, by
Python's audit events. Each input that found something is kept in tests/fuzz/found, and every `make test` runs
them all.
"""
