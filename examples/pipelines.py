"""`pipeline("text-generation")` with a cache of 128 tokens per layer: one prompt, a batch, a chat, many prompts."""

from transformers import pipeline

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples

model, tokenizer = embedded.load()
generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
samples = make_samples("kv_recall", tokenizer, length=512, count=4, seed=1)
prompts = [sample.prompt for sample in samples]
settings = {"max_new_tokens": 4, "return_full_text": False}


def cache() -> PagedEvictionCache:
    """A new one for every call of the pipeline."""
    return PagedEvictionCache(model.config, budget=128, policy="keydiff")


one = generator(prompts[0], cache=cache(), **settings)
batch = generator(prompts, batch_size=len(prompts), cache=cache(), **settings)
chat = generator([{"role": "user", "content": prompts[0]}], cache=cache(), **settings)
print(one, batch, chat, sep="\n")

# With more prompts than one batch the pipeline calls `generate` several times and would hand the same cache to each
# call: call the pipeline for each batch.
batches = prompts[:2], prompts[2:]
many = [answer for part in batches for answer in generator(part, batch_size=2, cache=cache(), **settings)]
print(many, [sample.answers[0] for sample in samples], sep="\n")
