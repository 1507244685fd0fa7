"""Decoded tokens: time, memory and where they go."""
