"""Functions in C for CPUs."""
