"""accelerate loads weights from disk layer by layer. Keys and values stay on the device that computes the layer."""

from tempfile import TemporaryDirectory

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples

tokenizer = AutoTokenizer.from_pretrained(embedded.path(), trust_remote_code=False)
sample = make_samples("kv_recall", tokenizer, length=512, count=1, seed=1)[0]
inputs = tokenizer(sample.prompt, return_tensors="pt")
# With accelerators, device_map="auto". Here two of the four layers go to disk.
places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
places |= {f"model.layers.{index}": "cpu" if index < 2 else "disk" for index in range(4)}

with TemporaryDirectory() as folder:
    model = AutoModelForCausalLM.from_pretrained(
        embedded.path(),
        device_map=places,
        offload_folder=folder,
        attn_implementation="paged_eviction",
        trust_remote_code=False,
    )
    cache = PagedEvictionCache(model.config, budget=128, policy="hybrid(snapkv, keydiff)")
    output = model.generate(**inputs, cache=cache, max_new_tokens=4)
answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
print(f"{sample.answers[0]!r}: {answer!r}")
