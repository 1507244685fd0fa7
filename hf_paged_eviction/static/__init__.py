"""Static caches: tensors keep their addresses, so that a decode step compiles into one graph."""
