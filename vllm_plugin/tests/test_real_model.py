"""A real model with its profile: the answers and the nats of a cache alone. `SMOLLM2_FOLDER=... pytest -m real`."""

import torch
from transformers import AutoTokenizer, DynamicCache
from vllm import SamplingParams

import real_model
from alone import cache_of
from engines import served
from hf_paged_eviction.internals import documentation
from hf_paged_eviction_eval.data.prompting.prompts import encode
from hf_paged_eviction_eval.tasks.suite import KV_RECALL, PASSKEY

pytestmark = real_model.REAL
ENGINE = {"max_model_len": 1100, "max_num_seqs": 10, "kv_cache_memory_bytes": 1 << 30, "max_num_batched_tokens": 512}


def test_answers() -> None:
    """To prompts of a thousand tokens, the question known, at a quarter of the memory."""
    tokenizer, model = AutoTokenizer.from_pretrained(real_model.FOLDER), real_model.model()
    samples = [task.make(tokenizer, 1000, at, chat=True) for task in (PASSKEY, KV_RECALL) for at in range(10)]
    prompts = {
        f"{sample.task}{at}": list(
            encode(sample, tokenizer, question_aware=True, max_length=None, chat_template="auto").context
        )
        for at, sample in enumerate(samples)
    }
    with served(real_model.FOLDER, model, real_model.OPTIONS, **ENGINE) as server:
        for name, prompt in prompts.items():
            server.add(name, prompt, 12)
        answers = {name.split("-")[0]: tokens for name, tokens in server.finish().items()}
        for name, prompt in prompts.items():
            server.check(name, prompt, answers[name])
        server.check_blocks()


@torch.no_grad()
def test_nats_of_running_text() -> None:
    """The text is read in chunks of 64 tokens, as in the tables of docs/real_models.md."""
    tokenizer, model = AutoTokenizer.from_pretrained(real_model.FOLDER), real_model.model()
    (text,) = tokenizer(documentation(), return_tensors="pt").input_ids[:, 2000:3024]
    nats = {}
    for name, cache in (("alone", cache_of(model.config, real_model.OPTIONS)), ("full", DynamicCache())):
        logits = [model(part[None], past_key_values=cache).logits[0] for part in text.split(64)]
        chosen = torch.cat(logits)[:-1].log_softmax(-1).gather(1, text[1:, None])
        nats[name] = -chosen.mean().item()
    with served(real_model.FOLDER, model, real_model.OPTIONS, **ENGINE | {"max_num_batched_tokens": 64}) as server:
        parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        (output,) = server.llm.generate([{"prompt_token_ids": text.tolist()}], parameters, use_tqdm=False)
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], text[1:].tolist(), strict=True)]
    nats["vllm"] = -sum(found) / len(found)
    print({name: round(value, 5) for name, value in nats.items()})
    assert abs(nats["vllm"] - nats["alone"]) < 1e-3
    assert nats["vllm"] - nats["full"] < 0.1
