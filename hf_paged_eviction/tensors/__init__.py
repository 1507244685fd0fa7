"""What holds for tensors of all rooms: rows, compiled graphs, autocast, and states that are saved."""
