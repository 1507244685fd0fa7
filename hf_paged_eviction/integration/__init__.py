"""What this package knows of transformers: its models, masks, pads and heads."""
