"""From text to token ids: truncation, chat template, the place of the question, batches."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.data.longbench import TASKS
from hf_paged_eviction_eval.data.longbench.records import to_sample
from hf_paged_eviction_eval.data.longbench.v2 import to_sample as to_sample_v2
from hf_paged_eviction_eval.data.prompting.prompts import Prompt, encode
from hf_paged_eviction_eval.data.prompting.truncation import cut_middle
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.batches import make_batches, pack
from hf_paged_eviction_eval.tasks import Sample
from hf_paged_eviction_eval.tasks.suites import load_samples as load_any
from longbench_files import longbench_record, longbench_v2_record, write_longbench, write_records

TEMPLATES = {
    "plain": "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "strips": "{% for m in messages %}[{{ m['role'] }}]\n\n{{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n\n{% endif %}",
    "bos": "{{ bos_token }}{% for m in messages %}User: {{ m['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}\nAssistant:{% endif %}",
    "system": "{% if messages[0]['role'] != 'system' %}<s>Be kind. A question: {{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "repeats": "{{ messages[0]['content'][:5] }} ... {{ messages[0]['content'] }}",
}
RULES: dict[str, Any] = {"question_aware": True, "max_length": None, "chat_template": "auto"}


def sentencepiece_like() -> Any:
    """A BOS before every text, and decoding that drops the first blank."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, show_progress=False)
    texts = [str(value) for name in TASKS for value in longbench_record(name, 0).values()]
    core.train_from_iterator([*texts, *(task.prompt for task in TASKS.values())], trainer)
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def word_like() -> Any:
    """Words only: decoding loses newlines, what is unknown, and the blanks before punctuation."""
    words = {word for name in TASKS for word in (TASKS[name].prompt + longbench_record(name, 0)["context"]).split()}
    vocabulary = {word: index for index, word in enumerate(["<unk>", *sorted(words)])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<unk>", clean_up_tokenization_spaces=True
    )


@pytest.fixture(scope="module")
def tokenizers(tokenizer: Any) -> dict[str, Any]:
    return {
        "bytes": tokenizer,
        "embedded": AutoTokenizer.from_pretrained(embedded.path()),
        "sentencepiece": sentencepiece_like(),
        "words": word_like(),
    }


KINDS = ("bytes", "embedded", "sentencepiece", "words")


@pytest.fixture
def chatty(tokenizers: dict[str, Any]) -> Any:
    """The tokenizer with a BOS, and without a template of its own."""
    tokenizer = AutoTokenizer.from_pretrained(embedded.path())
    tokenizer.chat_template = None
    return tokenizer


def official(prompt: str, tokenizer: Any, max_length: int) -> str:
    """The rule of LongBench, as it is described, word for word."""
    ids = tokenizer(prompt, truncation=False, return_tensors="pt").input_ids[0]
    if len(ids) > max_length:
        half = int(max_length / 2)
        prompt = tokenizer.decode(ids[:half], skip_special_tokens=True)
        prompt += tokenizer.decode(ids[-half:], skip_special_tokens=True)
    return prompt


def sample_of(task: str, index: int = 1, **changes: Any) -> Sample:
    return replace(to_sample(TASKS[task], longbench_record(task, index), index, ""), **changes)


def text_of(prompt: Prompt, tokenizer: Any) -> str:
    return str(tokenizer.decode(prompt.context + prompt.question))


TRUNCATED = ("hotpotqa", "gov_report", "trec", "samsum", "vcsum", "passage_retrieval_zh", "lcc", "repobench-p")


@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", TRUNCATED)
def test_truncation_is_official(task: str, kind: str, tokenizers: dict[str, Any]) -> None:
    """And its two parts are the truncated text, neither more nor less, and the second one is the question."""
    tokenizer, sample = tokenizers[kind], sample_of(task)
    length = len(tokenizer(sample.prompt)["input_ids"])
    asked = len(tokenizer(sample.question, add_special_tokens=False)["input_ids"])
    ends = {2, 3, 10, 11, asked, 2 * asked, 2 * asked + 6, (2 * asked + length) // 2}
    for max_length in {max(2, end) for end in ends} | {length // 2, length - 1, length, length + 1}:
        expected = official(sample.prompt, tokenizer, max_length)
        prompt = encode(sample, tokenizer, **(RULES | {"max_length": max_length, "chat_template": "never"}))
        assert (list(prompt.context), prompt.question) == (tokenizer(expected)["input_ids"], ())
        context, question, truncated = cut_middle(sample.context, sample.question, tokenizer, max_length)
        assert prompt.truncated == truncated == (length > max_length) and context + question == expected
        if truncated and max_length >= 2 * asked + 6:
            assert question[0].isspace() == sample.question[0].isspace()
            decoded = tokenizer.decode(tokenizer(sample.question, add_special_tokens=False)["input_ids"])
            assert words(question) == words(sample.question if kind in ("bytes", "embedded") else decoded, tokenizer)


def test_v2_keeps_an_odd_token_at_the_end(tokenizers: dict[str, Any]) -> None:
    tokenizer, sample = tokenizers["bytes"], to_sample_v2(longbench_v2_record(0), 0, "")
    ids = tokenizer(sample.prompt)["input_ids"]
    for max_length in (100, 101):
        prompt = encode(sample, tokenizer, **(RULES | {"max_length": max_length, "chat_template": "never"}))
        kept_ids = ids[: max_length // 2] + ids[-max_length // 2 :]
        assert len(kept_ids) == max_length
        assert list(prompt.context) == tokenizer(tokenizer.decode(kept_ids))["input_ids"]


def words(text: str, tokenizer: Any = None) -> str:
    unknown = tokenizer.unk_token if tokenizer is not None else None
    return "".join((text.replace(unknown, "") if unknown else text).split())


def test_truncation_never_reads_more_than_the_ends(tokenizers: dict[str, Any]) -> None:
    for max_length in (1, 0, -3):
        with pytest.raises(UserError, match="--max-length"):
            encode(sample_of("lcc"), tokenizers["bytes"], **(RULES | {"max_length": max_length}))


@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", TASKS)
def test_agnostic_prompts_are_two_texts_tokenised_apart(task: str, kind: str, tokenizers: dict[str, Any]) -> None:
    tokenizer, sample = tokenizers[kind], sample_of(task)
    prompt = encode(sample, tokenizer, **(RULES | {"question_aware": False, "chat_template": "never"}))
    assert list(prompt.context) == tokenizer(sample.context)["input_ids"]
    assert list(prompt.question) == tokenizer(sample.question, add_special_tokens=False)["input_ids"]
    assert prompt.context and prompt.question


@pytest.mark.each_value_once
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("task", ["qasper", "gov_report", "vcsum", "passage_count", "passage_retrieval_en"])
def test_chat_templates(task: str, template: str, chatty: Any) -> None:
    """The official way: the text of the template, tokenised without adding anything, and a split that loses nothing."""
    chatty.chat_template = TEMPLATES[template]
    sample = sample_of(task)
    message = [{"role": "user", "content": sample.prompt}]
    wrapped = chatty.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    aware = encode(sample, chatty, **RULES)
    assert aware.chat and list(aware.context) == chatty(wrapped, add_special_tokens=False)["input_ids"]
    assert aware.context.count(chatty.bos_token_id) == (template == "bos")
    agnostic = encode(sample, chatty, **(RULES | {"question_aware": False}))
    assert text_of(agnostic, chatty) == wrapped == text_of(aware, chatty)
    assert chatty.decode(agnostic.context).endswith(sample.context.strip())
    assert chatty.decode(agnostic.question).startswith(sample.question.rstrip())


@pytest.mark.parametrize("template", TEMPLATES)
def test_equal_contexts_have_equal_ids(template: str, chatty: Any) -> None:
    chatty.chat_template = TEMPLATES[template]
    questions = ("\n\nWho?", "\n\nWhere?", " ", "\n", "A", "B", "Assistant", "[assistant]", "<end>")
    for context in ("The story.", "The story. \n", " \nThe story", "A"):
        prompts = [
            encode(
                sample_of("qasper", context=context, question=question), chatty, **(RULES | {"question_aware": False})
            )
            for question in questions
        ]
        stripped = [prompt.context for prompt, question in zip(prompts, questions, strict=True) if question.strip()]
        assert len(set(stripped)) == 1
        assert all(prompt.question for prompt in prompts)


def test_truncated_first_then_wrapped(chatty: Any) -> None:
    chatty.chat_template = TEMPLATES["strips"]
    sample = sample_of("passage_retrieval_en")
    for max_length in (20, 81, 120):
        cut = official(sample.prompt, chatty, max_length)
        wrapped = f"[user]\n\n{cut.strip()}\n[assistant]\n\n"
        for aware in (True, False):
            prompt = encode(sample, chatty, **(RULES | {"max_length": max_length, "question_aware": aware}))
            assert prompt.truncated and text_of(prompt, chatty) == wrapped


def test_who_is_wrapped(chatty: Any) -> None:
    def chat(task: str, rule: str) -> bool:
        return encode(sample_of(task), chatty, **(RULES | {"chat_template": rule})).chat

    assert not chat("qasper", "auto")
    with pytest.raises(UserError, match="no chat template"):
        chat("qasper", "always")
    chatty.chat_template = TEMPLATES["plain"]
    assert (chat("qasper", "auto"), chat("qasper", "never"), chat("qasper", "always")) == (True, False, True)
    assert (chat("trec", "auto"), chat("lcc_e", "auto"), chat("trec", "always")) == (False, False, True)


def test_generated_tasks_are_asked_in_turns(chatty: Any) -> None:
    """Context and question are the user's turn, the cue begins the answer, and all of it fits the length."""
    task_settings = TaskSettings(model="m", policies=(), budgets=("full",), tasks=("passkey",), limit=2, lengths=(256,))

    def first(task: str, template: str, rule: Any) -> tuple[Sample, str]:
        chatty.chat_template = TEMPLATES[template]
        changed = task_settings.model_copy(update={"chat_template": rule})
        sample = load_any(task, changed, chatty, 256)[1]
        for aware in (True, False):
            prompt = encode(sample, chatty, question_aware=aware, max_length=None, chat_template=rule)
            assert 200 < prompt.tokens + sample.max_new_tokens <= 256
        return sample, text_of(prompt, chatty)

    raw, _ = first("passkey", "plain", "never")
    for template in ("plain", "strips"):
        for task in ("passkey", "kv_recall", "variable_tracking", "span_copy", "ruler_qa_1"):
            sample, text = first(task, template, "auto")
            assert sample.chat and sample.cue and text.endswith(sample.cue.strip())
            user, _, turn = text.rpartition(sample.question.strip())
            assert sample.context.strip() in user and "ssistant" in turn, text
    sample, _ = first("passkey", "plain", "auto")
    assert (raw.chat, raw.question) == (False, sample.question + sample.cue)
    assert sample.max_new_tokens > raw.max_new_tokens
    # Examples and code stay plain, as in LongBench, and so does all where nobody's turn is marked.
    assert not first("few_shot", "plain", "auto")[0].chat and first("few_shot", "plain", "always")[0].chat
    assert not first("next_line", "plain", "auto")[0].chat
    chatty.chat_template = AutoTokenizer.from_pretrained(embedded.path()).chat_template
    assert load_any("passkey", task_settings, chatty, 256)[1] == raw


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('only for saints') }}", "{% for", "{{ messages[7]['content'] }}"]
)
def test_templates_that_fail(template: str, chatty: Any) -> None:
    chatty.chat_template = template
    with pytest.raises(UserError, match=r"chat.*fails"):
        encode(sample_of("qasper"), chatty, **RULES)


def test_a_prompt_without_a_question_gives_its_last_token(tokenizers: dict[str, Any], chatty: Any) -> None:
    tokenizer, agnostic = tokenizers["bytes"], RULES | {"question_aware": False}
    sample = sample_of("lcc", question="")
    prompt = encode(sample, tokenizer, **agnostic)
    assert list(prompt.context + prompt.question) == tokenizer(sample.prompt)["input_ids"]
    assert len(prompt.question) == 1
    prompt = encode(sample_of("lcc", context="", question="Who was it?"), tokenizer, **agnostic)
    assert len(prompt.context) == 1 and text_of(prompt, tokenizer) == "Who was it?"
    chatty.chat_template = TEMPLATES["strips"]
    prompt = encode(sample_of("qasper", question=""), chatty, **agnostic)
    assert chatty.decode(prompt.question) == "\n[assistant]\n\n"
    for context in ("", "a"):
        with pytest.raises(UserError, match="one token"):
            encode(sample_of("lcc", context=context, question=""), tokenizer, **agnostic)
    with pytest.raises(UserError, match="is empty"):
        encode(sample_of("lcc", context="", question=""), tokenizer, **RULES)


def test_random_texts_are_split_without_loss(chatty: Any) -> None:
    rng = random.Random(0)
    alphabet = " \n\tabAB.,{}%<>é漢🙂"
    for _ in range(150):
        context, question = ("".join(rng.choices(alphabet, k=rng.randrange(1, 30))) for _ in range(2))
        chatty.chat_template = TEMPLATES[rng.choice(list(TEMPLATES))]
        sample = sample_of("qasper", context=context, question=question)
        rules = {"max_length": rng.choice((None, 4, 9, 20)), "chat_template": rng.choice(("auto", "never"))}
        aware = encode(sample, chatty, question_aware=True, **rules)
        agnostic = encode(sample, chatty, question_aware=False, **rules)
        assert text_of(agnostic, chatty) == text_of(aware, chatty)


# Batches.


def settings(folder: Path | None = None, **changes: Any) -> TaskSettings:
    defaults: dict[str, Any] = {"policies": (), "budgets": ("full",), "tasks": ("qasper",), "batch_size": 4}
    return TaskSettings(**(defaults | {"data_dir": None if folder is None else str(folder)} | changes))


def test_every_sample_is_in_one_batch(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    tasks = ("kv_recall", "qasper", "passkey", "trec_e")
    folder = write_longbench(tmp_path, ["qasper", "trec_e"], per_task=9)
    options = settings(folder, tasks=tasks, lengths=(128, 256), limit=6)
    batches = make_batches(options, tokenizers["embedded"])
    assert [(batch.task, batch.length, len(batch.prompts)) for batch in batches] == [
        (task, length, rows)
        for task, length in [
            *(("kv_recall", 128), ("passkey", 128), ("kv_recall", 256), ("passkey", 256)),
            *(("qasper", None), ("trec_e", None)),
        ]
        for rows in (4, 2)
    ]
    samples = [(batch.task, batch.length, prompt.sample.id) for batch in batches for prompt in batch.prompts]
    assert len(set(samples)) == len(samples) == 36
    assert batches == make_batches(options, tokenizers["embedded"])


def test_batches_waste_little() -> None:
    rng = random.Random(0)
    prompts = [encoded((index, *range(rng.randrange(90))), name=str(index)) for index in range(50)]
    batches = list(pack(prompts, 8))
    assert [len(batch) for batch in batches] == [8] * 6 + [2]
    lengths = [len(prompt.context) for batch in batches for prompt in batch]
    assert lengths == sorted(lengths, reverse=True)


def encoded(context: Any, question: tuple[int, ...] = (), name: str = "") -> Prompt:
    return Prompt(sample_of("lcc", id=name), tuple(context), question, False, False)


def test_questions_of_one_context_run_together() -> None:
    sizes = (1, 3, 2, 2, 5, 1, 4, 9)
    prompts = [
        encoded((number, *range(10)), (k,), f"{number}/{k}")
        for k in range(9)
        for number, n in enumerate(sizes)
        if k < n
    ]
    batches = list(pack(prompts, 4))
    assert sorted(prompt.sample.id for batch in batches for prompt in batch) == sorted(p.sample.id for p in prompts)
    assert all(1 <= len(batch) <= 4 for batch in batches)
    for number, size in enumerate(sizes):
        holding = [batch for batch in batches if any(prompt.context[0] == number for prompt in batch)]
        assert size > 4 or len(holding) == 1
        assert len(holding) <= 4


def test_the_models_context_is_the_longest_prompt(tmp_path: Path, tokenizers: dict[str, Any], chatty: Any) -> None:
    write_records(tmp_path / "qasper.jsonl", [longbench_record("qasper", 0) | {"context": "A story. " * 3000}])
    config = LlamaConfig(max_position_embeddings=1000)
    chatty.chat_template = "Be kind. " * 40 + TEMPLATES["bos"]
    for tokenizer in (tokenizers["bytes"], tokenizers["embedded"], tokenizers["sentencepiece"], chatty):
        for aware in (True, False):
            (batch,) = make_batches(settings(tmp_path, question_aware=aware), tokenizer, config)
            (prompt,) = batch.prompts
            assert prompt.truncated and 800 < prompt.tokens <= 1000 - TASKS["qasper"].max_new_tokens
    (batch,) = make_batches(settings(tmp_path), chatty)
    assert 3900 < batch.prompts[0].tokens <= 4096 - 128  # the embedded tokenizer knows a context of 4,096
    (batch,) = make_batches(settings(tmp_path), tokenizers["bytes"])
    assert not batch.prompts[0].truncated and batch.prompts[0].tokens > 6000
    (batch,) = make_batches(settings(tmp_path, max_length=300), tokenizers["bytes"], config)
    assert batch.prompts[0].tokens in range(290, 311)


def test_a_context_without_room_is_refused(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    folder, small = write_longbench(tmp_path, ["gov_report"]), LlamaConfig(max_position_embeddings=512)
    with pytest.raises(UserError, match=r"gov_report.*512"):
        make_batches(settings(folder, tasks=("gov_report",)), tokenizers["bytes"], small)


def test_automatic_sizes(tmp_path: Path, tokenizers: dict[str, Any], model: Any) -> None:
    folder = write_longbench(tmp_path, ["qasper"], per_task=20)
    options = settings(folder, batch_size=None, device="cpu")
    for config in (None, model.config):
        batches = make_batches(options, tokenizers["bytes"], config)
        assert sum(len(batch.prompts) for batch in batches) == 20
    assert [len(batch.prompts) for batch in make_batches(options, tokenizers["bytes"])] == [16, 4]


def test_a_length_too_small_says_what_to_change(tokenizers: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"does not fit.*--length"):
        make_batches(settings(tasks=("kv_recall_many",), lengths=(32,)), tokenizers["bytes"])
