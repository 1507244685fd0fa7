"""Print text while it is generated, with a policy that looks at attention."""

from threading import Thread

from transformers import TextIteratorStreamer

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples

model, tokenizer = embedded.load(attn_implementation="paged_eviction")
sample = make_samples("next_line", tokenizer, length=512, count=1, seed=1)[0]
inputs = tokenizer(sample.prompt, return_tensors="pt")

# Made here, so that a wrong setting raises here. An error inside the thread would leave the streamer waiting: give it a
# timeout. Several threads may share the model, each with a cache of its own.
cache = PagedEvictionCache(model.config, budget=128, policy="snapkv")
streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
thread = Thread(target=model.generate, kwargs={**inputs, "cache": cache, "streamer": streamer, "max_new_tokens": 40})
thread.start()
pieces = []
for piece in streamer:
    print(piece, end="", flush=True)
    pieces.append(piece)
thread.join()
print(f"\n{cache}")
