"""Rows as one long table, their means, and what is made of these: tables and plots."""
