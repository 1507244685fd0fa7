"""`generate` makes the cache itself: `custom_generate=` names a folder, or a repository on the Hub."""

from pathlib import Path

from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples

model, tokenizer = embedded.load()
sample = make_samples("kv_recall", tokenizer, length=512, count=1, seed=1)[0]
inputs = tokenizer(sample.prompt, return_tensors="pt")
paged = {"custom_generate": str(Path(__file__).parents[1] / "custom_generate"), "trust_remote_code": True}

output = model.generate(**inputs, **paged, budget=128, policy="keydiff", max_new_tokens=4, return_dict_in_generate=True)
answer = tokenizer.decode(output.sequences[0, inputs.input_ids.shape[1] :])
print(f"{sample.answers[0]!r}: {answer!r}")
print(output.cache)

# The next turn: the whole text so far, and the cache of the turn before in place of the settings.
question = tokenizer("\n" + sample.question, add_special_tokens=False, return_tensors="pt").input_ids
text = output.sequences.new_tensor([*output.sequences[0], *question[0]])[None]
again = model.generate(text, **paged, cache=output.cache, max_new_tokens=4)
print(f"again: {tokenizer.decode(again[0, text.shape[1] :])!r}")
