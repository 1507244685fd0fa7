"""How many bits a kept token is worth: codes, levels, and the store that keeps them."""
