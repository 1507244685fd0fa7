"""Weights of four bits and a cache of 128 tokens per layer: keys and values keep the dtype of the activations."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples

model = AutoModelForCausalLM.from_pretrained(
    embedded.path(),
    dtype=torch.bfloat16,
    trust_remote_code=False,
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
)
tokenizer = AutoTokenizer.from_pretrained(embedded.path(), trust_remote_code=False)
sample = make_samples("kv_recall", tokenizer, length=512, count=1, seed=1)[0]
inputs = tokenizer(sample.prompt, return_tensors="pt")

cache = PagedEvictionCache(model.config, budget=128, policy="keydiff")
output = model.generate(**inputs, cache=cache, max_new_tokens=4)
answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
print(f"{sample.answers[0]!r}: {answer!r}")
print(cache)
