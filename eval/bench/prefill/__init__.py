"""The time to the first token."""
