"""lm-evaluation-harness with a paged KV cache: the model type `hf-paged-eviction`.

Importing this module makes the type known; `python -m hf_paged_eviction_eval.lm_eval` is the harness's own command line
with the module imported:

    python -m hf_paged_eviction_eval.lm_eval --model hf-paged-eviction \\
        --model_args pretrained=meta-llama/Llama-3.1-8B-Instruct,budget=1024,policy=keydiff --tasks gsm8k
"""

try:
    import lm_eval.models.huggingface as _harness  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"lm-evaluation-harness is not installed ({error}): pip install 'hf_paged_eviction[lm-eval]'", name=error.name
    ) from error

from .model import PagedEvictionLM

__all__ = ["PagedEvictionLM"]
