"""What runs one batch of prompts under every policy and budget."""
