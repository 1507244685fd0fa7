"""The loss that Attention-Gate trains its gates with: through the decisions, as if they were their scores."""
