"""A long text is read and compressed once, saved without a pickle, and answers a batch of questions later."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples

model, tokenizer = embedded.load()
tokenizer.padding_side = "left"
sample = make_samples("kv_recall", tokenizer, length=1024, count=1, seed=1)[0]
context = tokenizer(sample.context, return_tensors="pt")
folder = TemporaryDirectory()
file = Path(folder.name) / "context.safetensors"

# One day: read, compress, save.
cache = PagedEvictionCache(model.config, budget="256KiB", policy="keydiff")
with torch.inference_mode():
    model(**context, cache=cache)
cache.save(file, input_ids=context.input_ids, model=model)
print(f"{cache.get_seq_length()} tokens read, {cache.budget} held, {file.stat().st_size} bytes saved")

# Another day, perhaps another machine: one context, several questions. The text is not needed any more.
cache = PagedEvictionCache.load(file, model, device=model.device)
texts = [sample.question, "Say it again. " + sample.question]
questions = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
cache.batch_repeat_interleave(len(texts))
inputs = cache.follow_up(questions.input_ids, questions.attention_mask)
output = model.generate(**inputs, cache=cache, max_new_tokens=4)
for row in output[:, inputs["input_ids"].shape[1] :]:
    print(f"{sample.answers[0]!r}: {tokenizer.decode(row)!r}")
folder.cleanup()
