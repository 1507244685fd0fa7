"""`verify`: right caches are exact, caches broken on purpose are found, and the model is left as it was."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

import hf_paged_eviction
import models
from hf_paged_eviction import PagedEvictionCache, Verification, verify
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.layer import overflow
from hf_paged_eviction.layer.paged import PagedLayer
from hf_paged_eviction.masks.padding import Padding
from hf_paged_eviction.queries import attention
from hf_paged_eviction.store.store import Store
from hf_paged_eviction.table.budget import BlockBudget
from hf_paged_eviction.table.table import BlockTable
from hf_paged_eviction_eval.verify import checking, session
from hf_paged_eviction_eval.verify.checking import make_plan
from hf_paged_eviction_eval.verify.report import Check


def outcomes(report: Verification) -> set[str]:
    return {check.outcome for check in report.checks}


def only(wanted: Callable[[Check], bool]) -> AbstractContextManager[Any]:
    """Of all checks these: each costs as much as several forwards."""
    return patch.object(checking, "make_plan", lambda *sizes: list(filter(wanted, make_plan(*sizes))))


# ---- right caches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.all_cases) for name in ("gemma3", "gpt_oss", "qwen3_next"))],
)
def test_a_right_cache_is_exact(family: str) -> None:
    """And the model is left as it was, training and dropout included."""
    model = in_training(family)
    before, calls = state(model), list[tuple[int, int]]()
    report = verify(model, progress=lambda done, total: calls.append((done, total)))
    assert same(before, state(model))
    assert report.ok and outcomes(report) == {"exact"}, str(report)
    assert report.noise <= report.tolerance
    assert 1e-4 <= report.tolerance < 3e-4
    assert all(check.error is not None and check.error <= report.tolerance for check in report.checks)
    modes = Counter(check.mode for check in report.checks)
    assert modes == {"dynamic": 18, "static": 10, "unequal budgets": 4}, "a check is missing"
    # The comparison had something to find.
    assert min(check.effect for check in report.checks if check.effect is not None) > 0.2
    assert calls == [(done, len(report.checks)) for done in range(len(report.checks) + 1)]
    lines = str(report).splitlines()
    assert lines[0] == f"{report.model}, float32 on cpu: {len(report.checks)} exact"
    assert sum("  exact  " in line for line in lines) == len(report.checks)
    assert json.loads(json.dumps(asdict(report)))["checks"][0]["error"] == 0.0


def test_latent_attention() -> None:
    """Which has no heads: its budgets differ between layers alone."""
    with only(lambda check: check.mode != "dynamic" and check.attention == "paged_eviction"):
        report = verify(models.shared("deepseek_v3"))
    assert len(report.of("exact")) == len(report.checks) == 9, str(report)


def test_half_precision_is_judged_by_its_own_rounding() -> None:
    report = verify(models.build("llama").to(torch.bfloat16), thorough=False)
    assert outcomes(report) == {"exact"}, str(report)
    assert report.dtype == "bfloat16" and 1e-2 < report.noise < report.tolerance < 0.6


def test_budgets_that_are_equal_after_all_are_found() -> None:
    right = Heads.shares
    broken = patch.object(Heads, "shares", lambda *args: [torch.ones_like(shares) for shares in right(*args)])
    with broken, only(lambda check: check.mode == "unequal budgets" and check.question == "exact for what it holds"):
        report = verify(models.shared("llama"))
    assert len(report.of("wrong")) == len(report.checks) == 3, str(report)
    assert all("at budgets of" in check.reason for check in report.checks)


@pytest.mark.parametrize("fault", [{"disposal": "gone"}, {"gone": True}, {"allocator": "gone"}])
def test_options_that_do_not_exist_are_no_refusal_of_the_model(fault: dict[str, Any]) -> None:
    """What is withdrawn from the cache must not vanish from the checks while the result stays good."""
    options = session._options
    broken = patch.object(session, "_options", lambda *args: options(*args) | fault)
    with broken, pytest.raises(RuntimeError, match=r"at fault.*gone"):
        verify(models.shared("llama"), thorough=False)


def test_the_short_way_finds_most() -> None:
    """A large and a small budget, in chunks and in steps, both implementations; told of before the first check."""
    calls: list[tuple[int, int]] = []
    report = verify(models.shared("llama"), thorough=False, progress=lambda done, total: calls.append((done, total)))
    assert outcomes(report) == {"exact"} and calls[0] == (0, len(report.checks)) and len(report.checks) == 6
    assert {check.question for check in report.checks} == {
        "same as DynamicCache", "exact for what it holds", "row as alone",
    }  # fmt: skip
    assert {check.calls for check in report.checks} == {"one forward", "chunks"}
    assert {check.attention for check in report.checks} == {"sdpa", "paged_eviction"}


def test_every_value_meets_every_question() -> None:
    plan = make_plan("sdpa", 20)
    for question in ("same as DynamicCache", "exact for what it holds", "row as alone"):
        checks = [check for check in plan if check.question == question]
        assert {(check.attention, check.calls) for check in checks} >= {
            (name, calls) for name in ("sdpa", "paged_eviction") for calls in ("one forward", "chunks", "steps")
        }
        assert {(check.heads, check.mode) for check in checks} >= {
            (heads, mode) for heads in ("shared", "separate") for mode in ("dynamic", "static")
        }
    assert len({(check.question, check.calls) for check in plan if check.mode == "unequal budgets"}) == 4


# ---- caches that are broken on purpose -----------------------------------------------------------------------------


def neighbours(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        keys, values = right(*args)
        return keys, values.roll(1, 2)

    return wrong


#: What stands where instead of what is right.
BROKEN: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "slot n is token n": (PagedLayer, "get_mask_sizes", lambda right: lambda *args: (right(*args)[0], 0)),
    "positions": (BlockTable, "new_positions", lambda right: lambda self, *args: right(self, *args) + bool(self.seen)),
    "nothing is protected": (
        overflow,
        "_protected",
        lambda right: lambda state, table, at: torch.zeros_like(at).bool(),
    ),
    "no pads": (Padding, "columns", lambda right: lambda *args: None),
    "values of a neighbour": (Store, "shown", neighbours),
    "too much is held": (
        BlockBudget,
        "resolve",
        lambda right: lambda self, tokens: right(self.of(self.capacity + 4), tokens),
    ),
    "no mask of its own": (attention, "mask_of_call", lambda right: lambda *args: (None, False)),
    "a crash": (overflow, "best_tokens", lambda right: lambda keys, positions, count: keys[..., :count] * 10),
}


@pytest.mark.parametrize(
    ("broken", "question", "message"),
    [
        ("slot n is token n", "exact for what it holds", ""),
        ("slot n is token n", "row as alone", ""),
        ("positions", "exact for what it holds", "not seen"),
        ("nothing is protected", "exact for what it holds", "first or of the newest block"),
        ("no pads", "row as alone", ""),
        ("values of a neighbour", "exact for what it holds", ""),
        ("too much is held", "exact for what it holds", "holds 24 tokens at a budget of 20"),
        ("no mask of its own", "same as DynamicCache", ""),
        ("a crash", "exact for what it holds", "it fails: "),
    ],
)
def test_a_broken_cache_is_found(broken: str, question: str, message: str) -> None:
    """By the few checks that the command makes when nothing is said."""
    owner, name, wrong = BROKEN[broken]
    with patch.object(owner, name, wrong(getattr(owner, name))):
        report = verify(models.shared("llama"), thorough=False)
    assert not report.ok
    found = [check for check in report.of("wrong") if check.question == question]
    assert found, str(report)
    assert all(check.reason or (check.error or 0.0) > 0.05 for check in found)
    assert any(message in check.reason for check in found) and "WRONG" in str(report)


def test_attention_that_forgets_a_cap_is_found() -> None:
    """Both runs of the cache agree then; only the model's own function tells."""

    def forgetful(module: Any, *args: Any, softcap: Any = None, **kwargs: Any) -> Any:
        return attention.paged_eviction_attention(module, *args, **kwargs)

    model = models.build("gemma2", attn_logit_softcapping=2.0)
    with patch.dict(AttentionInterface._global_mapping, {"paged_eviction": forgetful}):
        report = verify(model, thorough=False)
    assert {check.attention for check in report.of("wrong")} == {"paged_eviction"}
    assert {check.question for check in report.of("wrong")} == {"same as DynamicCache", "exact for what it holds"}
    assert "exact" in {check.outcome for check in report.checks if check.attention == "eager"}


# ---- models of which less can be said ------------------------------------------------------------------------------


def tiny(model_type: str, **settings: Any) -> Any:
    config = AutoConfig.for_model(model_type, **{**models._COMMON, **settings})
    return models.randomise(AutoModelForCausalLM.from_config(config), 0)


def test_a_model_that_is_refused() -> None:
    report = verify(tiny("bloom", n_layer=2, n_head=4), thorough=False)
    assert report.ok and outcomes(report) == {"refused"}
    assert str(report).count("ALiBi") == 1 and len(str(report).splitlines()) == 2


def test_a_model_that_evicts_nothing() -> None:
    report = verify(models.shared("mistral_sliding"), thorough=False)
    assert (
        report.ok
        and report.of("exact")
        and {check.question for check in report.of("exact")} == {"same as DynamicCache"}
    )
    assert {check.reason for check in report.of("not covered")} == {"no layer of this model evicts"}
    lines = str(report).splitlines()
    assert sum("not covered" in line for line in lines[1:]) == 1, "one line for all checks that share a reason"
    assert lines[-1].startswith(f"{len(report.of('not covered'))} not covered, ")
    assert lines[-1].endswith(": no layer of this model evicts")


def test_a_model_with_attention_code_of_its_own() -> None:
    """GPT-J does not ask the attention interface: masks reach it through hooks."""
    report = verify(tiny("gptj", n_embd=32, n_layer=2, n_head=4, rotary_dim=4), thorough=False)
    assert report.ok, str(report)
    own = [check for check in report.checks if check.attention != "paged_eviction"]
    assert {check.outcome for check in own} == {"exact"}
    assert all("own code" in check.reason for check in report.of("not covered"))


def test_an_encoder_decoder_model() -> None:
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {f"{part}_{what}": count for part in ("encoder", "decoder") for what, count in SIZES.items()}
    config = AutoConfig.for_model("bart", vocab_size=models.VOCABULARY, max_position_embeddings=256, **sizes, **heads)
    model = models.randomise(transformers_seq2seq(config), 0)
    with torch.no_grad():
        model.model.shared.weight.normal_(generator=torch.Generator().manual_seed(1))
    report = verify(model)
    assert report.ok and outcomes(report) == {"refused"}, str(report)
    assert {"bart is an encoder-decoder model" in check.reason for check in report.checks} == {True}


SIZES = {"layers": 2, "attention_heads": 4}


def transformers_seq2seq(config: Any) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_config(config)


def leaning_on_calls(module: Any, args: Any, states: torch.Tensor) -> torch.Tensor:
    """What a token is depends on its place in the forward, as in recurrent layers that restart."""
    return states + torch.arange(states.shape[1])[:, None] * 0.1


def leaning_on_pads(module: Any, args: Any, states: torch.Tensor) -> torch.Tensor:
    return states + states.mean(1, keepdim=True)


@pytest.mark.parametrize("hook", [leaning_on_calls, leaning_on_pads])
def test_what_the_model_itself_makes_of_calls_and_pads_is_no_fault(hook: Any) -> None:
    model = models.build("llama")
    model.model.embed_tokens.register_forward_hook(hook)
    report = verify(model, thorough=False)
    assert report.ok, str(report)
    assert any("depends on its pads" in line for line in report.notes)
    assert {check.question for check in report.of("exact")} >= {"same as DynamicCache", "exact for what it holds"}
    assert {check.question for check in report.of("not covered")} == {"row as alone"}


def test_a_model_that_hardly_attends_tells_nothing() -> None:
    model = models.build("llama")
    for block in model.model.layers:
        block.self_attn.o_proj.weight.data.mul_(1e-7)
    report = verify(model, thorough=False)
    assert report.ok and all(check.question != "exact for what it holds" for check in report.of("exact"))


def test_a_model_that_says_nan() -> None:
    model = models.build("llama")
    model.lm_head.weight.data.fill_(float("nan"))
    report = verify(model, thorough=False)
    assert outcomes(report) == {"not covered"} and "nan" in report.checks[0].reason


@pytest.mark.parametrize(("budget", "message"), [(18, "budget=18"), (12, "at least 16")])
def test_budgets_that_cannot_be(budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(models.shared("llama"), budget=budget)


def test_something_else_than_a_language_model() -> None:
    with pytest.raises(TypeError, match="language"):
        verify(torch.nn.Linear(2, 2))


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


def compiled(model: Any) -> Any:
    def never(*graph: Any) -> Any:
        raise AssertionError("it was compiled")

    return torch.compile(model, backend=never)


@pytest.mark.parametrize("wrap", [with_lora, compiled])
def test_a_model_that_is_wrapped(wrap: Callable[[Any], Any]) -> None:
    """LoRA hands all arguments on, and says so in no signature; what is compiled runs without that."""
    report = verify(wrap(models.build("llama")), thorough=False)
    assert outcomes(report) == {"exact"}, str(report)


# ---- the model afterwards ------------------------------------------------------------------------------------------


def state(model: Any) -> Any:
    """All that a forward, or a change of the attention implementation, could have left behind."""
    modules = [(module.training, sorted(vars(module)), len(module._forward_pre_hooks)) for module in model.modules()]
    tensors = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    settings = model.config.to_dict(), model.config._attn_implementation, model.generation_config.to_dict()
    interfaces = sorted(AttentionInterface._global_mapping), sorted(AttentionMaskInterface._global_mapping)
    return modules, tensors, settings, interfaces, torch.get_rng_state(), torch.is_grad_enabled()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def in_training(family: str) -> Any:
    """A model that is neither as it was made nor as `eval` leaves it."""
    model = models.build(family, attention_dropout=0.5).train()
    model.model.layers[0].mlp.eval()
    model.model.layers[1].register_forward_hook(remember)
    return model


def test_the_model_is_left_as_it_was_when_it_is_stopped() -> None:
    model = in_training("llama")
    before = state(model)

    def stop(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(model, thorough=False, progress=stop)
    assert same(before, state(model))
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def remember(module: Any, args: Any, output: Any) -> None:
    module.last_output = output


def test_a_model_that_fails_is_left_as_it_was() -> None:
    model = models.build("llama")
    before = state(model)
    with patch.object(PagedEvictionCache, "update", lambda *args, **kwargs: 1 / 0):
        report = verify(model, thorough=False)
    assert same(before, state(model))
    assert outcomes(report) == {"wrong"} and "ZeroDivisionError" in report.checks[0].reason


def test_attention_of_the_users_own_is_taken() -> None:
    AttentionInterface.register("mine_for_verify", sdpa_attention_forward)
    AttentionMaskInterface.register("mine_for_verify", AttentionMaskInterface._global_mapping["sdpa"])
    try:
        with only(lambda check: check.calls == "one forward" and check.mode in ("dynamic", "static")):
            report = verify(models.build("llama", "mine_for_verify"))
    finally:
        del AttentionInterface._global_mapping["mine_for_verify"]
        del AttentionMaskInterface._global_mapping["mine_for_verify"]
    assert report.ok and "mine_for_verify" in {check.attention for check in report.of("exact")}
    assert all(check.mode == "static" for check in report.of("refused"))


class Absent:
    """Finds no harness."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "hf_paged_eviction_eval":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_without_the_harness_the_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verify", "Verification"):
        monkeypatch.delitem(vars(hf_paged_eviction), name, raising=False)
    for name in [name for name in sys.modules if name.startswith("hf_paged_eviction_eval")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "hf_paged_eviction.recipes.verify", raising=False)
    with pytest.raises(ImportError, match=r"pip install.*hf_paged_eviction\[eval\]"):
        _ = hf_paged_eviction.verify
