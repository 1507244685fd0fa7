"""A chat in the terminal that shows what the cache does."""
