"""The paged layer and its parts."""
