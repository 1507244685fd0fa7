"""Scores and shares that were fitted to a model's attention."""
