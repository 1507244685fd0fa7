"""Which token is where, and which goes next: positions, scores and victims of each layer."""
