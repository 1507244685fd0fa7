"""`transformers serve` with eviction on."""

from __future__ import annotations
