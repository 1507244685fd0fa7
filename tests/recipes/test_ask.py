"""Several questions about one context: what `ask` answers is what `generate` would."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import models
from hf_paged_eviction import PagedEvictionCache, ask
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval import embedded

CONTEXT = "The code of clover is lagoon. The code of maple is ember." + " Nothing is known of oak." * 24
QUESTIONS = [
    "What is the code of clover?",
    "And of maple? Say it twice, then say which of the two codes came first in the text.",
    "Why?",
]
#: Marks turns, strips messages, and knows of thinking.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] "
    "{% if enable_thinking is defined and not enable_thinking %}ready{% endif %}{% endif %}"
)
SHORT = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return embedded.load()[1]


@pytest.fixture(autouse=True)
def as_it_was(tokenizer: Any) -> Any:
    template = tokenizer.chat_template
    yield
    tokenizer.chat_template = template


def a_model(tokenizer: Any, family: str = "llama", attention: str = "sdpa") -> Any:
    return models.build(family, attention, vocab_size=len(tokenizer), max_position_embeddings=2048)


def generated(model: Any, tokenizer: Any, /, text: str, special: bool, **options: Any) -> str:
    """What `generate` with a DynamicCache answers."""
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=special)
    cache = {CACHE_ARGUMENT: DynamicCache(config=model.config)}
    output = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, **cache, **{**SHORT, **options})
    answer: str = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return answer


@pytest.mark.parametrize("chunk_size", [64, 4096])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "gpt2"])
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_with_room_for_all_it_is_generate(tokenizer: Any, template: str | None, family: str, chunk_size: int) -> None:
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model = a_model(tokenizer, family)
    tokenizer.chat_template = template
    texts = [f"{CONTEXT}\n\n{question}" for question in QUESTIONS]
    if template:
        texts = [f"<bos>[user] {text}\n[assistant] " for text in texts]
    expected = [generated(model, tokenizer, text, special=not template) for text in texts]
    answers = ask(model, tokenizer, CONTEXT, QUESTIONS, 1024, chunk_size=chunk_size, **SHORT)
    assert answers == expected
    if family == "llama":  # others of random weights hear the newest tokens only
        assert len(set(expected)) == len(expected)


@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "h2o", "streaming_llm"])
def test_questions_do_not_see_each_other(tokenizer: Any, policy: str) -> None:
    model = a_model(tokenizer, attention="paged_eviction")
    alone = {question: ask(model, tokenizer, CONTEXT, question, 128, policy, **SHORT) for question in QUESTIONS}
    assert len(set(alone.values())) == len(QUESTIONS)
    for first in range(len(QUESTIONS)):
        questions = QUESTIONS[first:] + QUESTIONS[:first]
        answers = ask(model, tokenizer, CONTEXT, questions, 128, policy, **SHORT)
        assert answers == [alone[question] for question in questions]


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 8},
        {"allocator": "pyramid"},
        {"positions": "cache"},
        {"heads": "separate"},
        {"static": True},
        {"static": True, "bits": 8},
    ],
    ids=str,
)
def test_a_small_budget_is_the_context_read_and_copied(tokenizer: Any, settings: dict[str, Any]) -> None:
    """Options of the cache go to the cache, and the answers are those of a context that was read by hand."""
    model = a_model(tokenizer, attention="paged_eviction")
    tokenizer.chat_template = None
    context = tokenizer(CONTEXT, return_tensors="pt").input_ids
    expected = []
    for question in QUESTIONS:
        cache = PagedEvictionCache(model.config, 128, policy="keydiff", **settings)
        with torch.no_grad():
            for part in context.split(100, dim=1):
                model(part, **{CACHE_ARGUMENT: cache})
        more = tokenizer(f"{CONTEXT}\n\n{question}", return_tensors="pt").input_ids[:, context.shape[1] :]
        output = model.generate(**cache.follow_up(more), **{CACHE_ARGUMENT: cache}, **SHORT)
        expected.append(tokenizer.decode(output[0, context.shape[1] + more.shape[1] :], skip_special_tokens=True))
    answers = ask(model, tokenizer, CONTEXT, QUESTIONS, 128, "keydiff", chunk_size=100, **SHORT, **settings)
    assert answers == expected


def test_options_of_generate(tokenizer: Any) -> None:
    model = a_model(tokenizer)
    tokenizer.chat_template = None
    text = f"{CONTEXT}\n\n{QUESTIONS[0]}"
    for options in ({"num_beams": 3}, {"repetition_penalty": 1.5}):
        answer = ask(model, tokenizer, CONTEXT, QUESTIONS[0], 1024, **SHORT, **options)
        assert answer == generated(model, tokenizer, text, True, **options), options
    model.generation_config.num_beams = 2
    assert ask(model, tokenizer, CONTEXT, QUESTIONS[0], 1024, **SHORT) == generated(model, tokenizer, text, True)


def test_a_share_of_memory_is_one_of_the_whole_context(tokenizer: Any) -> None:
    model = a_model(tokenizer)
    length = len(tokenizer(CONTEXT).input_ids)
    config = model.config
    heads = config.num_hidden_layers * config.num_key_value_heads
    full = 2 * 2 * length * heads * config.hidden_size // config.num_attention_heads
    options = {"policy": "keydiff", "chunk_size": 64, **SHORT}
    expected = ask(model, tokenizer, CONTEXT, QUESTIONS, f"{full * 3 // 4}B", **options)
    assert ask(model, tokenizer, CONTEXT, QUESTIONS, "75% of memory", **options) == expected


@pytest.mark.parametrize("place", ["option", "configuration given", "model's configuration"])
def test_strings_that_end_an_answer(tokenizer: Any, place: str) -> None:
    model = a_model(tokenizer)
    tokenizer.chat_template = None
    text = f"{CONTEXT}\n\n{QUESTIONS[0]}"
    whole = generated(model, tokenizer, text, True, max_new_tokens=12)
    stop = whole[len(whole) // 2]
    options: dict[str, Any] = {"stop_strings": [stop]}
    if place == "configuration given":
        options = {"generation_config": GenerationConfig(**options, pad_token_id=0)}
    elif place == "model's configuration":
        model.generation_config.stop_strings, options = stop, {}
    long = {**SHORT, "max_new_tokens": 12, **options}
    answer = ask(model, tokenizer, CONTEXT, QUESTIONS[0], 1024, **long)
    assert answer == generated(model, tokenizer, text, True, **long, tokenizer=tokenizer)
    assert stop in answer and whole.startswith(answer) and len(answer) < len(whole)


def test_the_template_is_told(tokenizer: Any) -> None:
    model = a_model(tokenizer)
    tokenizer.chat_template = TEMPLATE
    answer = ask(model, tokenizer, CONTEXT, "Why? ", 1024, chat_template_kwargs={"enable_thinking": False}, **SHORT)
    text = f"<bos>[user] {CONTEXT}\n\nWhy?\n[assistant] ready"
    assert answer == generated(model, tokenizer, text, special=False)


def test_a_share_is_one_of_the_context(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not of the first chunk."""
    held: list[int] = []
    real = PagedEvictionCache.__deepcopy__
    monkeypatch.setattr(
        PagedEvictionCache,
        "__deepcopy__",
        lambda cache, memo: (held.append(cache.stats().largest_held), real(cache, memo))[1],
    )
    model, length = a_model(tokenizer), len(tokenizer(CONTEXT).input_ids)
    ask(model, tokenizer, CONTEXT, "Why?", "50%", "keydiff", chunk_size=32, **SHORT)
    assert held == [-(-length // 32) * 16]
    ask(model, tokenizer, "A short one.", "Why?", "1%", "keydiff", **SHORT)


def test_the_embedded_model_answers() -> None:
    model, tokenizer = embedded.load()
    from hf_paged_eviction_eval.tasks import make_samples

    sample = make_samples("kv_recall", tokenizer, length=1024, count=1, seed=1)[0]
    model.set_attn_implementation("paged_eviction")
    answer = ask(
        model,
        tokenizer,
        sample.context,
        sample.question,
        128,
        "keydiff",
        separator="",
        max_new_tokens=8,
        do_sample=False,
    )
    assert answer.split() == list(sample.answers)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"context": " "}, r"context.*empty"),
        ({"questions": ["Who?", ""]}, r"question.*empty"),
        ({"questions": None}, "questions"),
        ({"questions": [3]}, r"question.*3"),
        ({"chunk_size": 0}, r"chunk_size.*1"),
        ({"past_key_values": None, "input_ids": 1}, "input_ids, past_key_values"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"token_healing": True}, "token_healing"),
        ({"generation_config": GenerationConfig(token_healing=True)}, "token_healing"),
        ({"the model heals": True}, "token_healing"),
        ({"mm_token_type_ids": torch.zeros(1, 9)}, r"mm_token_type_ids.*generate"),
        ({"budget": 100}, r"nearest.*96.*112"),
        ({"policy": "kvzip"}, "'kvzip'"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"polcy": "keydiff"}, "'polcy'.*'policy'"),
        ({"use_cache": False}, "use_cache=False"),
        ({"generation_config": GenerationConfig(prompt_lookup_num_tokens=3)}, "prompt_lookup_num_tokens=3"),
    ],
)
def test_what_is_refused(tokenizer: Any, changes: dict[str, Any], reason: str) -> None:
    tokenizer.chat_template = None
    model = a_model(tokenizer, attention="paged_eviction")
    arguments: dict[str, Any] = {"context": CONTEXT, "questions": ["Why?"], "budget": 128, **SHORT, **changes}
    model.generation_config.token_healing = arguments.pop("the model heals", False)
    with pytest.raises((TypeError, ValueError), match=reason):
        ask(model, tokenizer, *map(arguments.pop, ("context", "questions", "budget")), **arguments)


def test_the_model_comes_first(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model(tokenizer)
    monkeypatch.setattr(model, "forward", lambda *_, **__: pytest.fail("the text was read"))
    with pytest.raises(TypeError, match="model comes first"):
        ask(tokenizer, model, CONTEXT, "Why?", 128)
    with pytest.raises(TypeError, match=r"tokenizer must be.*NoneType"):
        ask(model, None, CONTEXT, "Why?", 128)
    with pytest.raises(TypeError, match="Did you mean 'policy'"):
        ask(model, tokenizer, CONTEXT, "Why?", 128, polcy="keydiff")


def test_how_many_tokens_an_answer_has(tokenizer: Any) -> None:
    """An argument before `generation_config=`, before the model's own."""
    model, tokenizer.chat_template = a_model(tokenizer), None
    model.generation_config.eos_token_id = None

    def answer(**options: Any) -> str:
        return ask(model, tokenizer, CONTEXT, "Why?", 1024, "keydiff", do_sample=False, **options)

    by_count = {count: answer(max_new_tokens=count) for count in (3, 5, 7)}
    assert len(set(by_count.values())) == 3
    config = GenerationConfig(max_new_tokens=5, eos_token_id=None)
    assert answer(generation_config=config) == by_count[5]
    assert answer(generation_config=config, max_new_tokens=3) == by_count[3]
    model.generation_config.max_new_tokens = 7
    assert answer() == by_count[7]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ no_such_thing() }}", "'no_such_thing'"),
        ("{{ messages[0]['content'] | upper }}", "context before"),
        ("{{ messages[0]['content'] | length }}: {{ messages[0]['content'] }}", "context before"),
        (
            "{% if messages[0]['content'] | length > 1000 %}Long: {% endif %}{{ messages[0]['content'] }}",
            "another beginning",
        ),
    ],
)
def test_templates_that_cannot_be_cut(tokenizer: Any, template: str, reason: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=reason):
        ask(a_model(tokenizer), tokenizer, CONTEXT, ["Why?", "What is the code of clover?" * 40], 128, **SHORT)
