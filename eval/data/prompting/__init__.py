"""From tasks to token ids, by the official rules."""
