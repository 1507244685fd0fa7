"""`transformers serve` with eviction on."""
