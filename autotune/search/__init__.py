"""Which candidates a key has, what a sweep has to do, and which program to compile next."""
