"""Fit a score to a model."""
