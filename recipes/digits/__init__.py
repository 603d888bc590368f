"""Handwritten digits: a small convolutional network on real images, in seconds."""
