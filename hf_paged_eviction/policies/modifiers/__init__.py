"""Policies around other policies."""
