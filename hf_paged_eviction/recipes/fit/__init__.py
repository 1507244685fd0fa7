"""Fit a score to a model: the calibrated score, and gates."""
