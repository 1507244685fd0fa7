"""Scores that were fitted to attention."""
