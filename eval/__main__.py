"""`python -m hf_paged_eviction_eval` is the command `paged-eviction`; so is `accelerate launch -m` of the same."""

from .cli import main

if __name__ == "__main__":
    main()
