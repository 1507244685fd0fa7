"""Policies that decide by keys, values and positions: with every attention implementation."""
