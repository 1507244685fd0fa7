"""What a paged layer is made of, object by object."""
