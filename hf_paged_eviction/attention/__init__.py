"""Attention worked out by hand: weights for scoring, parts that are joined, keys that lie in segments."""
