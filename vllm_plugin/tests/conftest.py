"""vLLM in this process and those that it starts, on the CPU, without network and outside of the home."""

import atexit
import os
import shutil
import tempfile

FOLDER = os.environ.get("VLLM_CACHE_ROOT") or tempfile.mkdtemp(prefix="vllm-")
if "VLLM_CACHE_ROOT" not in os.environ:
    atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # the tests say how much memory they need
os.environ.update(
    {
        "VLLM_CACHE_ROOT": FOLDER,
        "VLLM_CONFIG_ROOT": FOLDER,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_CI_ENV": "1",  # no warm-up of kernels
    }
)
