"""What fits into how much memory, before anything is loaded."""

from .plan import Choice, Plan, plan

__all__ = ["Choice", "Plan", "plan"]
