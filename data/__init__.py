"""Loaders: wrapping, combining, windows, moving batches."""
