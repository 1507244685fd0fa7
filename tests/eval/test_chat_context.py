"""A chat that goes on from a saved context, and one whose budget is in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.caches.contexts import open_context
from hf_paged_eviction_eval.chat import session as session_module
from hf_paged_eviction_eval.chat.answering import Interrupt, Listener
from hf_paged_eviction_eval.chat.conversation import Conversation
from hf_paged_eviction_eval.chat.settings import chat_settings
from hf_paged_eviction_eval.commands import app
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.chat import ChatOptions
from hf_paged_eviction_eval.tasks import make_samples

MODEL, TOKENIZER = embedded.load()
SAMPLE = make_samples("kv_recall", TOKENIZER, length=512, count=1, seed=1)[0]


@pytest.fixture(autouse=True)
def load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    MODEL.set_attn_implementation("sdpa")
    monkeypatch.setattr(session_module, "load", lambda made: (MODEL, TOKENIZER))


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    (folder / "text.txt").write_text(SAMPLE.context, encoding="utf-8")
    path = folder / "text.safetensors"
    typed = ["compress", "--text", folder / "text.txt", "--output", path, "--budget", 128, "--policy", "keydiff"]
    assert CliRunner().invoke(app, list(map(str, typed))).exit_code == 0
    return path


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["chat", *map(str, arguments)], env={"COLUMNS": "400"})
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


def say(conversation: Conversation, message: str) -> Any:
    with Interrupt() as interrupt:
        return conversation.answer(conversation.prepare(message), Listener(TOKENIZER), interrupt)


def test_answers_a_question_about_the_context_and_begins_there_again(context: Path, tmp_path: Path) -> None:
    question = SAMPLE.question.strip()
    prompts = [question, "/blocks", "/budget 64", "/reset", question]
    said = run("--context", context, *(part for each in prompts for part in ("--prompt", each)))
    assert "keydiff, budget 128 in blocks of 16, behind" in said and f"tokens of {context}" in said
    assert said.count(SAMPLE.answers[0]) >= 2
    assert "/64 held" in said and "a new conversation with a budget of 128" in said
    conversation = Conversation(MODEL, TOKENIZER, chat_settings(ChatOptions(context=context, max_new_tokens=2)))
    assert say(conversation, question).text.split()[0].startswith(SAMPLE.answers[0])
    start = conversation.context
    assert start > 450 and TOKENIZER.decode(conversation.ids[start:]).strip().startswith(question)


@pytest.mark.parametrize("template", [True, False])
def test_turns_are_those_of_the_cache_that_was_saved(context: Path, template: bool) -> None:
    conversation = Conversation(
        MODEL, TOKENIZER, chat_settings(ChatOptions(context=context, chat_template=template, max_new_tokens=6))
    )
    start = conversation.context
    answers = [say(conversation, SAMPLE.question.strip()), say(conversation, "Say it again. " + SAMPLE.question)]
    assert conversation.ids[:start] == [0] * start and 1 not in conversation.ids[start:], "it begins once only"
    cache = open_context(context, MODEL)
    end = len(conversation.ids) - len(answers[1].tokens) + (answers[1].ending == "end")
    new = torch.tensor([conversation.ids[start:end]])
    first = conversation.seen - start
    assert first >= new.shape[1]
    said: list[list[int]] = []
    length = answers[0].read
    inputs = cache.follow_up(new[:, :length])
    limits = {"max_new_tokens": 6, "do_sample": False, "past_key_values": cache}
    said.append(MODEL.generate(**inputs, **limits)[0, start + length :].tolist())
    inputs = cache.follow_up(new[:, cache.get_seq_length() - start :])
    said.append(MODEL.generate(**inputs, **limits)[0, inputs["input_ids"].shape[1] :].tolist())
    assert said == [answer.tokens for answer in answers]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", 64), "--budget does not go with --context"),
        (("--policy", "keydiff"), "--policy does not go with --context"),
        (("--heads", "separate"), "made with all of these when the text was read"),
        (("--full",), "the text, which is not in the file"),
        (("--system", "Be kind."), "begins with the context"),
    ],
)
def test_what_contradicts_the_file_is_refused(context: Path, arguments: tuple[object, ...], words: str) -> None:
    assert words in run("--context", context, *arguments, status=2)


def test_files_that_a_chat_cannot_go_on_from(context: Path, tmp_path: Path) -> None:
    assert "cannot use the context" in run("--context", tmp_path / "none.safetensors", "--prompt", "a", status=2)
    ids = torch.arange(3, 63).expand(2, -1)
    for name, mask in (("rows", torch.ones_like(ids)), ("pads", (torch.arange(60) > 4).long()[None])):
        MODEL.set_attn_implementation("paged_eviction")
        cache = PagedEvictionCache(MODEL.config, budget=64, policy="tova", attention_mask=mask)
        with torch.inference_mode():
            MODEL(ids[: len(mask)], attention_mask=mask, past_key_values=cache)
        cache.save(tmp_path / f"{name}.safetensors")
    assert "goes on from one text" in run("--context", tmp_path / "rows.safetensors", "--prompt", "a", status=2)
    path = tmp_path / "pads.safetensors"
    assert "was read with pads" in run("--context", path, "--prompt", "a", status=2)
    MODEL.set_attn_implementation("sdpa")
    typed = ("--attn-implementation", "sdpa", "--prompt", "a")
    assert "tova needs paged_eviction" in run("--context", path, *typed, status=2)


def test_a_budget_in_bytes() -> None:
    conversation = Conversation(MODEL, TOKENIZER, chat_settings(ChatOptions(budget="128KiB", max_new_tokens=2)))
    assert conversation.budget == conversation.cache.budget == 64
    say(conversation, SAMPLE.context)
    assert conversation.cache.stats().storage_bytes <= 128 * 1024
    with pytest.raises(UserError, match="bytes turn into tokens only when a prompt arrives"):
        Conversation(MODEL, TOKENIZER, conversation.options.but(policy="keydiff@ada_kv"))
    said = run("--budget", "128KiB", "--prompt", "/budget 48", "--prompt", "/budget")
    assert "budget 64 in blocks of 16 (128KiB)" in said and "0/48 held" in said
    for typed, words in (
        (("--budget", "1MiB,2MiB"), "no number of bytes"),
        (("--budget", "1G"), "no number of bytes"),
        (("--budget", "25%"), "write tokens, such as 256, or bytes"),
        (("--budget", "9kB"), "--budget 9kB: budget=9,000 bytes is too small"),
    ):
        assert words in run(*typed, "--prompt", "a", status=2)
