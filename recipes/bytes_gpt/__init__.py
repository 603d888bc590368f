"""A small byte-level GPT on the source text of the Python standard library."""
