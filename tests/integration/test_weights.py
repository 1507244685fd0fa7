"""One digest of weights: the same for every copy of a model, another for every other model."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import gguf_files
import models
from hf_paged_eviction import register_weights, weights_digest
from hf_paged_eviction.integration.weights import _REGISTERED, SAMPLE, register_checkpoint, registered_digest
from hf_paged_eviction.naming.digests import file_digest

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def tiny(seed: int = 0, **settings: Any) -> Any:
    model = models.build("llama", **settings).float()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def of_bfloat16(**settings: Any) -> Any:
    """A model whose weights came in bfloat16, as most do; some of them very small, and a negative zero."""
    model = tiny(**settings)
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            flat[:16] = torch.logspace(-12, -3, 16)
            flat[16] = -0.0
    return model.bfloat16().float()


@pytest.mark.parametrize("dtype", FLOATS)
def test_copies_in_every_precision_agree(dtype: torch.dtype) -> None:
    model = of_bfloat16()
    assert weights_digest(copy.deepcopy(model).to(dtype)) == weights_digest(model)


def test_bfloat16_agrees_with_finer_weights() -> None:
    model = tiny()
    assert weights_digest(copy.deepcopy(model).bfloat16()) == weights_digest(model)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_saved_copy_agrees_whatever_its_folder_is_called(dtype: torch.dtype, tmp_path: Path) -> None:
    model = of_bfloat16()
    copy.deepcopy(model).to(dtype).save_pretrained(tmp_path / "another name")
    for wanted in FLOATS:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "another name", dtype=wanted)
        assert weights_digest(loaded) == weights_digest(model)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_a_gguf_file_agrees_with_what_was_saved_from_it(kind: str, tmp_path: Path) -> None:
    """Unquantised or not: transformers has dequantised it."""
    pytest.importorskip("gguf")
    gguf_files.write_gguf(tmp_path / "a.gguf", kind=kind)
    digests = set()
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=dtype)
        digests.add(weights_digest(model))
        again = AutoModelForCausalLM.from_config(model.config).to(dtype)
        again.load_state_dict(model.state_dict())
        again.save_pretrained(tmp_path / "safe")
        digests.add(weights_digest(AutoModelForCausalLM.from_pretrained(tmp_path / "safe", dtype=dtype)))
    assert len(digests) == 1


def test_norms_of_gemma_come_through_gguf() -> None:
    """Such files hold norms plus one in float32, which costs the last bits of small ones."""
    model = of_bfloat16()
    through = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in through.named_parameters():
            if "norm" in name:
                parameter.copy_((parameter + 1) - 1)
    assert weights_digest(through) == weights_digest(model)


def change_number(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data[3, 4] *= 1.01


def swap_layers(model: Any) -> None:
    model.model.layers = nn.ModuleList(reversed(model.model.layers))


def swap_matrices(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj


def scale_norm(model: Any) -> None:
    model.model.norm.weight.data *= 1.01


def negate(model: Any) -> None:
    model.lm_head.weight.data.neg_()


def another_seed(model: Any) -> None:
    model.load_state_dict(tiny(seed=1).state_dict())


def to_nan(model: Any) -> None:
    model.model.norm.weight.data[0] = torch.nan


CHANGES = (change_number, swap_layers, swap_matrices, scale_norm, negate, another_seed, to_nan)


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_have_another_digest(change: Callable[[Any], None]) -> None:
    model = tiny()
    before = weights_digest(model)
    change(model)
    assert weights_digest(model) != before == weights_digest(tiny())


def test_of_a_large_tensor_a_sample_is_read_all_over_it() -> None:
    """Every row and every column of a square matrix would be noticed."""
    linear = nn.Linear(1024, 1024, bias=False)
    before = weights_digest(linear)
    for part in range(0, 1024, 61):
        for where in ((part, slice(None)), (slice(None), part)):
            changed = copy.deepcopy(linear)
            changed.weight.data[where] += 1.0
            assert weights_digest(changed) != before
    assert linear.weight.numel() > SAMPLE


def test_tied_weights_count_once() -> None:
    tied = tiny(tie_word_embeddings=True)
    untied = tiny(tie_word_embeddings=False)
    untied.load_state_dict(tied.state_dict())
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert weights_digest(untied) == weights_digest(tied)


def test_wrappers_do_not_count() -> None:
    model = tiny()
    before = weights_digest(model)
    assert weights_digest(nn.DataParallel(model)) == before
    assert weights_digest(torch.compile(model)) == before
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert weights_digest(model) == before


def test_what_is_worked_out_does_not_count() -> None:
    """Frequencies of a dynamic rotation change while the model runs."""
    model = tiny()
    before = weights_digest(model)
    model.model.rotary_emb.inv_freq.mul_(2)
    assert weights_digest(model) == before


def test_of_adapters_those_count_that_are_active() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = tiny()
    alone = weights_digest(model)
    settings = {"target_modules": ["q_proj", "embed_tokens"], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings, modules_to_save=["lm_head"]), "one")
    adapted.add_adapter("two", peft.LoraConfig(**settings))
    one = weights_digest(adapted)
    assert one == weights_digest(model) != alone  # the inner model has the adapters, too
    adapted.set_adapter("two")
    two = weights_digest(adapted)
    with adapted.disable_adapter():
        assert weights_digest(adapted) == alone
    adapted.set_adapter("one")
    assert weights_digest(adapted) == one
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    layer.set_scale("one", 3.0)
    assert len({alone, one, two, weights_digest(adapted)}) == 4


def test_a_merged_adapter_is_part_of_the_weights() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(tiny(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.merge_adapter()
    merged = weights_digest(adapted)
    assert merged == weights_digest(adapted.merge_and_unload()) != weights_digest(tiny())


def test_a_learned_prompt_is_refused() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="prompt learning"):
        weights_digest(adapted)


@pytest.mark.parametrize("to_disk", [False, True])
def test_offloaded_weights_are_read_where_they_are(to_disk: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny(tie_word_embeddings=True)
    before = weights_digest(model)
    if to_disk:
        accelerate.disk_offload(model, tmp_path, torch.device("cpu"))
    else:
        accelerate.cpu_offload(model, torch.device("cpu"))
    assert model.model.norm.weight.device.type == "meta"
    assert weights_digest(model) == before


def test_weights_without_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"embed_tokens\.weight"):
        weights_digest(tiny().to("meta"))
    with pytest.raises(ValueError, match="no weights"):
        weights_digest(nn.ReLU())
    with pytest.raises(TypeError, match="LlamaConfig"):
        weights_digest(tiny().config)


def test_codes_count_as_they_are() -> None:
    """Quantised layers hold integers, or numbers of 8 bits; some as tensors made of others."""
    from torch.testing._internal.two_tensor import TwoTensor

    def layer(code: int) -> nn.Module:
        module = nn.Module()
        module.register_buffer("codes", torch.tensor([[1, code]], dtype=torch.uint8))
        module.register_buffer("eight", torch.tensor([1.0, code]).to(torch.float8_e4m3fn))
        module.made = nn.Parameter(TwoTensor(torch.ones(2), torch.tensor([1.0, code])), requires_grad=False)
        return module

    assert weights_digest(layer(2)) == weights_digest(layer(2)) != weights_digest(layer(3))
    for name in ("codes", "eight", "made"):
        mixed = layer(2)
        setattr(mixed, name, getattr(layer(3), name))
        assert weights_digest(mixed) != weights_digest(layer(2))


def test_a_configuration_knows_its_weights_once_they_are_registered() -> None:
    model = tiny()
    assert registered_digest(model.config) is None
    assert register_weights(model) == weights_digest(model) == registered_digest(model.config)
    assert registered_digest(copy.deepcopy(model.config)) is None
    change_number(model)
    assert register_weights(model) == weights_digest(model) == registered_digest(model.config)
    assert "digest" not in str(model.config.to_dict())
    gc.collect()
    registered = len(_REGISTERED)
    del model
    gc.collect()
    assert len(_REGISTERED) == registered - 1


def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    for name, content in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (file_digest(tmp_path / name) for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("part", ["5GB", "10KB"])
def test_files_of_a_checkpoint_have_the_digest_of_the_model(tied: bool, part: str, tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=part)
    config = AutoConfig.from_pretrained(tmp_path)
    assert register_checkpoint(config, tmp_path) == weights_digest(model) == registered_digest(config)
    assert register_checkpoint(config, tmp_path / "nothing") is None
