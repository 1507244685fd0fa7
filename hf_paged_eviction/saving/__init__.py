"""A cache in a file: what is in it, who may use it, and what is refused."""
