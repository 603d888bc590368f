"""Models larger than a device."""
