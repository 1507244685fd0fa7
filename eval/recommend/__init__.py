"""Which cache suits a model and texts: `paged-eviction recommend`."""
