"""`paged-eviction fit-basis` and `fit-fold`: commands of the harness, which finds them by entry points."""
