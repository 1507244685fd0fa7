"""KV-cache eviction inside vLLM: `--additional-config '{"paged_eviction": {"budget": 1024}}'`.

vLLM finds this package by its entry points; nothing has to be imported. `docs/vllm.md` of the project says what is
served, what is promised and what is refused.
"""
