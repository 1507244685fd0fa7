"""How a cache is made of options: its policy by name, its budget, its gates, texts that it has read."""
