"""Attention of queries that wait, over a bounded memory of keys and values (Attendre)."""
