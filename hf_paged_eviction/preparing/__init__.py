"""Measure once, for a model, what it should keep: scores, shares of heads, and which cache is best."""
