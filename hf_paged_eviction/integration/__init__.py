"""Knowledge of transformers: its models, rotary embeddings, heads and chat templates."""
