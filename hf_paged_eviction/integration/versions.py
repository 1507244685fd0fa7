"""The releases that the tests run with. Makefile, constraints and documentation name the same ones; a test compares
them."""

#: Releases of transformers that the contract suite runs with, oldest first. The gate runs with the last.
TRANSFORMERS = ("5.14.1", "5.23.0", "5.24.0")
#: The oldest and the newest minor release of torch that the contract suite was run with.
TORCH = ("2.8", "2.15")

OLDEST, NEWEST = TRANSFORMERS[0], TRANSFORMERS[-1]
