"""Callbacks and the event bus."""
