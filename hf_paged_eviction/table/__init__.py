"""The bookkeeping of a layer: positions, scores and victims."""
