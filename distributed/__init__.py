"""Processes, devices, random states, errors."""
