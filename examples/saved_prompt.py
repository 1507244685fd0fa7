"""A long text is read and compressed once, saved, and answers several questions later, each from a copy."""

from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples

model, tokenizer = embedded.load()
sample = make_samples("kv_recall", tokenizer, length=1024, count=1, seed=1)[0]
context = tokenizer(sample.context, return_tensors="pt")

with TemporaryDirectory() as folder:
    cache = PagedEvictionCache(model.config, budget=128, policy="keydiff")
    with torch.inference_mode():
        model(**context, past_key_values=cache)
    torch.save(cache, Path(folder) / "context.pt")
    # A pickle: load only what you saved yourself. The model has to be the same, its attention implementation too.
    cache = torch.load(Path(folder) / "context.pt", weights_only=False)

for question in (sample.question, "Say it again. " + sample.question):
    text = tokenizer(sample.context + question, return_tensors="pt")
    output = model.generate(**text, past_key_values=deepcopy(cache), max_new_tokens=4)
    answer = tokenizer.decode(output[0, text.input_ids.shape[1] :])
    print(f"{sample.answers[0]!r}: {answer!r}")
print(cache)
