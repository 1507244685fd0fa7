"""Attention in torch operators: weights for scoring, joined parts, keys in segments."""
