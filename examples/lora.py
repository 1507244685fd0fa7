"""LoRA adapters with PEFT: on, switched, off, merged. The cache needs only the configuration of the model."""

import torch
from peft import LoraConfig, get_peft_model

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples

model, tokenizer = embedded.load()
sample = make_samples("kv_recall", tokenizer, length=512, count=1, seed=1)[0]
inputs = tokenizer(sample.prompt, return_tensors="pt")


def say() -> str:
    # Keys that were made with one adapter mean something else to the next: a new cache after every change of weights.
    cache = PagedEvictionCache(model.config, budget=128, policy="keydiff")
    output = model.generate(**inputs, cache=cache, max_new_tokens=8)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :])


base = say()
torch.manual_seed(0)
model = get_peft_model(
    model, LoraConfig(target_modules=["k_proj", "v_proj"], lora_alpha=64, init_lora_weights=False), "first"
)
model.add_adapter("second", LoraConfig(target_modules=["q_proj", "o_proj"], lora_alpha=64, init_lora_weights=False))
first = say()
model.set_adapter("second")
second = say()
with model.disable_adapter():
    off = say()
model.set_adapter("first")
model = model.merge_and_unload()
merged = say()
print(f"{base=}\n{first=}\n{second=}\n{off=}\n{merged=}")
