"""What made the embedded model and its files; not installed. Run from the root of the repository."""
