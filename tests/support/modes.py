"""The ways in which generate, or a user, drives a cache."""

from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache

import models
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

CHUNKS = (11, 9, 7, 5, 3, 3, 2)
#: Enough for three blocks of four to be chosen, the last of them among blocks that were overwritten.
STEPS = 10
LENGTHS = [40, 33, 9]

#: Modes that crop: one row only, and every layer must be able to undo a forward.
SPECULATIVE = ("prompt_lookup", "assisted")
MODES = (
    "greedy",
    "sampling",
    "beam",
    "return_sequences",
    "chunked_prefill",
    "two_turns",
    "three_turns",
    "direct",
    "inputs_embeds",
    *SPECULATIVE,
)

_SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beam": {"num_beams": 3},
    "return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "chunked_prefill": {"prefill_chunk_size": 7},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1},
}


def batch(mode: str, padded: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask that suit the mode: rows of very different length, or of one."""
    lengths = LENGTHS if padded else [LENGTHS[0]] * len(LENGTHS)
    if mode in SPECULATIVE:
        # A text that repeats itself, so that the lookup finds something.
        row = models.prompts([10], seed)[0].repeat(4)[: LENGTHS[0]]
        return models.left_pad([row], LENGTHS[0] + 5 if padded else None)
    return models.left_pad(models.prompts(lengths, seed))


def dynamic(model: Any) -> DynamicCache:
    """What transformers would use."""
    return DynamicCache(config=model.config)


def run(model: Any, cache: Any, mode: str, ids: Tensor, mask: Tensor, steps: int = STEPS) -> Tensor:
    """Drive the cache through the mode; returns all tokens that were generated, [rows, tokens]."""
    if mode == "direct":
        return direct(model, cache, ids, mask, steps)
    if mode in ("two_turns", "three_turns"):
        return turns(model, cache, ids, mask, 2 if mode == "two_turns" else 3, steps // 2)
    if mode == "inputs_embeds":
        embeds = model.get_input_embeddings()(ids)
        return generate(model, cache, None, mask, steps, inputs_embeds=embeds)
    settings = dict(_SETTINGS.get(mode, {}))
    if mode == "assisted":
        # The same weights, slightly spoiled: most proposals are accepted and some are not.
        settings["assistant_model"] = spoiled(model)
    return generate(model, cache, ids, mask, steps, **settings)[:, ids.shape[1] :]


def spoiled(model: Any) -> Any:
    """A llama that mostly agrees with the llama of seed 0, or a stranger to any other model."""
    assistant = models.build("llama")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for parameter in assistant.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return assistant


def generate(model: Any, cache: Any, ids: Tensor | None, mask: Tensor, steps: int, **settings: Any) -> Tensor:
    """`model.generate` of exactly `steps` tokens, seeded."""
    torch.manual_seed(0)
    settings = {"do_sample": False, "pad_token_id": models.PAD, "max_new_tokens": steps, **settings}
    if "prompt_lookup_num_tokens" in settings:
        # transformers 4 looks for the end of text without asking whether there is one.
        settings["eos_token_id"] = models.VOCABULARY
    if ids is not None:
        settings["input_ids"] = ids
    return model.generate(attention_mask=mask, **{CACHE_ARGUMENT: cache}, **settings)


def extend(mask: Tensor, count: int) -> Tensor:
    """The mask after `count` more real tokens."""
    return torch.cat([mask, mask.new_ones(len(mask), count)], dim=1)


def turns(model: Any, cache: Any, ids: Tensor, mask: Tensor, count: int, steps: int) -> Tensor:
    """Several turns with the full ids each time; returns what the model said in all of them."""
    answers = []
    for turn in range(count):
        if turn:
            user = torch.stack(models.prompts([6] * len(ids), seed=turn))
            ids, mask = torch.cat([ids, user], dim=1), extend(mask, 6)
        width = ids.shape[1]
        ids = generate(model, cache, ids, mask, steps)
        mask = extend(mask, ids.shape[1] - width)
        answers.append(ids[:, width:])
    return torch.cat(answers, dim=1)


def forward(model: Any, cache: Any, ids: Tensor, mask: Tensor, start: int, stop: int) -> Tensor:
    """Logits of the columns `start .. stop`, which are fed to the cache."""
    positions = models.positions_of(mask)
    with torch.no_grad():
        return model(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            **{CACHE_ARGUMENT: cache},
            use_cache=True,
        ).logits


def direct(model: Any, cache: Any, ids: Tensor, mask: Tensor, steps: int, chunks: tuple[int, ...] = CHUNKS) -> Tensor:
    """Uneven chunks through the model's own forward, then greedy tokens one at a time."""
    start = 0
    for size in chunks:
        stop = min(start + size, ids.shape[1])
        if start < stop:
            logits = forward(model, cache, ids, mask, start, stop)
        start = stop
    while start < ids.shape[1]:
        logits = forward(model, cache, ids, mask, start, start + 1)
        start += 1
    chosen = []
    for _ in range(steps):
        chosen.append(logits[:, -1].argmax(-1, keepdim=True))
        ids, mask = torch.cat([ids, chosen[-1]], dim=1), extend(mask, 1)
        logits = forward(model, cache, ids, mask, ids.shape[1] - 1, ids.shape[1])
    return torch.cat(chosen, dim=1)


def stepwise(model: Any, ids: Tensor, mask: Tensor, cache: Any, steps: int, backend: Any = None) -> Tensor:
    """Logits `[steps, batch, vocabulary]` of an answer; with a backend, steps are compiled by it to graphs without a
    break."""
    how: dict[str, Any] = {"disable_compile": True}
    if backend is not None:
        how = {"compile_config": CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=None)}
        how["compile_config"]._compile_all_devices = True
    output = model.generate(
        ids,
        attention_mask=mask,
        **{CACHE_ARGUMENT: cache},
        **how,
        max_new_tokens=steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(output.logits)
