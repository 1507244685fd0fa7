"""The options of a cache: their definition, checks and defaults."""
