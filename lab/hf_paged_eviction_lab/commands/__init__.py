"""`paged-eviction fit-basis`, `fit-fold` and `fit-gate`: commands of the harness, which finds them by entry points."""
