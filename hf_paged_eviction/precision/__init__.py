"""Keys and values in few bits: codecs, and the store for their codes."""
