"""The one paged layer: its verbs, and its parts object by object."""
