"""Caches whose tensors stay where they are, so that a decode step compiles into one graph."""
