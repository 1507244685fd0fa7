"""Policies by name."""

from ..naming import Kind, Registry
from ..naming.policies import POLICY_MODULES
from .base import EvictionPolicy
from .modifier import Modifier

#: The registry of policies.
POLICIES: Registry[EvictionPolicy] = Registry(
    Kind("policy", "policies", "snapkv(window=16)", "caote(h2o)"),
    EvictionPolicy,  # type: ignore[type-abstract]
    Modifier,
    POLICY_MODULES,
)
register_policy, make_policy = POLICIES.register, POLICIES.make
available_policies, available_modifiers = POLICIES.names, POLICIES.modifiers
