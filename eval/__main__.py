"""`python -m hf_paged_eviction_eval` is the command `paged-eviction`."""

from .cli import main

main()
