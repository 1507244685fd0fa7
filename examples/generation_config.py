"""The settings of a `GenerationConfig` beside a paged cache."""

from transformers import GenerationConfig

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples

model, tokenizer = embedded.load()
sample = make_samples("kv_recall", tokenizer, length=1024, count=1, seed=1)[0]
inputs = tokenizer(sample.prompt, return_tensors="pt")

# prefill_chunk_size bounds the memory of the prompt as well, to budget + 256 tokens. cache_implementation stays unset
# (generate refuses it beside a cache; "paged" would switch to continuous batching and ignore the cache), use_cache is
# not switched off. Fields that transformers does not know, such as budget=, would be kept and ignored.
config = GenerationConfig(
    max_new_tokens=20,
    prefill_chunk_size=256,
    stop_strings=["."],
    repetition_penalty=1.05,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
cache = PagedEvictionCache(model.config, budget=256, policy="keydiff")
output = model.generate(**inputs, generation_config=config, cache=cache, tokenizer=tokenizer)
answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
print(f"{sample.answers[0]!r}: {answer!r}")
print(cache)
