"""The folder of a run: rows, shards, locks, facts."""
