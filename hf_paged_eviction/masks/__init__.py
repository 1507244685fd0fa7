"""Masks and pads."""
