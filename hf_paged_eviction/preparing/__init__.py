"""Measure a model once: scores of tokens, shares of heads, and the best cache."""
