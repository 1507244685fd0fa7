"""Policies whose score was, or is, fitted to the model."""
