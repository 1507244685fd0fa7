"""Rows averaged, tabulated and drawn."""
