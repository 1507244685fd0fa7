"""LoRA: each request is answered by its adapter, and no snapshot goes from one to another."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from draw_servers import Asked, is_right
from engines import drawn, served
from tiny_models import tiny

RANK = 8


def adapted(model: Any, folder: Path, seed: int) -> Any:
    """Save an adapter of all layers' queries and values; the model with it."""
    generator, tensors, merged = torch.Generator().manual_seed(seed), {}, copy.deepcopy(model)
    for number, layer in enumerate(merged.model.layers):
        for name in ("q_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            down, up = (
                torch.randn(shape, generator=generator) * 0.2
                for shape in ((RANK, weight.shape[1]), (len(weight), RANK))
            )
            prefix = f"base_model.model.model.layers.{number}.self_attn.{name}"
            tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
            weight.data += up @ down
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return merged


def test_two_adapters(tmp_path: Path) -> None:
    (folder, model), rng = tiny("llama"), random.Random(2)
    models = {"": model} | {name: adapted(model, tmp_path / name, seed) for seed, name in enumerate("ab")}
    adapters = {name: LoRARequest(name, "ab".index(name) + 1, str(tmp_path / name)) for name in "ab"} | {"": None}
    engine = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    prompt, asked = drawn(rng, 150), {}
    with served(folder, model, {"budget": 96, "policy": "keydiff"}, **engine) as server:
        for turn, name in [(turn, name) for turn in range(3) for name in adapters]:
            if turn == 0:
                text = prompt
            elif turn == 1:
                before = asked[f"r{name}0"]
                text = [*before.text, before.answers[0][-1], *prompt[:40]]
            else:  # what another one has answered is no beginning
                text = asked["ra1" if name == "b" else "rb1"].text
            asked[f"r{name}{turn}"] = Asked([text], 40)
            server.add(f"r{name}{turn}", text, 40, lora_request=adapters[name])
            if name != "a":  # vLLM's operations for CPUs give requests without an adapter that of others beside them
                for one, tokens in server.finish().items():
                    asked[one].answers = [tokens]
        begun = {one: sum(server.record.begun[server.record.name(one)]) for one in asked}
        assert begun == {one: 160 if one.endswith("1") else 0 for one in asked}
        for name, own in models.items():
            own.set_attn_implementation("paged_eviction")
            server.model = own
            assert all(is_right(server, f"r{name}{turn}", asked[f"r{name}{turn}"]) for turn in range(3)), name
        assert len({tuple(asked[f"r{name}0"].answers[0]) for name in adapters}) == 3
        server.check_blocks()
