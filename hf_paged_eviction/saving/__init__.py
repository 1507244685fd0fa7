"""Save caches to files, and load them."""
