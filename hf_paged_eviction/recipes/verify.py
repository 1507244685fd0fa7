"""`verify`, which is part of the harness: whether the cache is right for a model."""

try:
    from hf_paged_eviction_eval.verify import Verification, verify
except ModuleNotFoundError as error:
    if error.name != "hf_paged_eviction_eval":
        raise
    raise ImportError(
        "verify is part of the harness, hf_paged_eviction_eval, which is not installed here: "
        "pip install 'hf_paged_eviction[eval]'."
    ) from error

__all__ = ["Verification", "verify"]
