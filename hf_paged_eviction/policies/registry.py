"""Policies by name."""

from ..naming import Kind, Registry
from .base import EvictionPolicy
from .modifier import Modifier

#: The registry of policies.
POLICIES: Registry[EvictionPolicy] = Registry(
    Kind("policy", "policies", "snapkv(window=16)", "caote(h2o)"),
    EvictionPolicy,  # type: ignore[type-abstract]
    Modifier,
)
register_policy, make_policy = POLICIES.register, POLICIES.make
available_policies, available_modifiers, available_policy_files = POLICIES.names, POLICIES.modifiers, POLICIES.files
