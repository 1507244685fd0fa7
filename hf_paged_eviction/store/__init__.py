"""The storage of keys and values."""
