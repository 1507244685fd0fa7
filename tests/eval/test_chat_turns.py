"""Messages become tokens that only ever grow."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_paged_eviction_eval.chat.answering import Interrupt, Listener
from hf_paged_eviction_eval.chat.conversation import Conversation
from hf_paged_eviction_eval.chat.settings import chat_settings
from hf_paged_eviction_eval.chat.turns import Turns, encode, encode_after
from hf_paged_eviction_eval.commands import app
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.chat import ChatOptions

HEAD = "{% for m in messages %}<|{{ m['role'] }}|>\n"
TAIL = "<eos>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
PLAIN = HEAD + "{{ m['content'] }}" + TAIL
TRIMMED = HEAD + "{{ m['content'] | trim }}" + TAIL
THINKING = HEAD + "{{ m['content'].split('</think>')[-1] }}" + TAIL
COUNTED = "{{ messages | length }} messages\n" + PLAIN
FORGETFUL = HEAD + "{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}" + TAIL
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN


def with_template(tokenizer: Any, template: str | None) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def talk_through(turns: Any, answers: list[str]) -> tuple[list[int], list[bool]]:
    ids, rewritten = [], []
    for number, answer in enumerate(answers):
        turn = turns.next(f"question {number}")
        turns.begin(turn)
        ids += turn.ids
        rewritten.append(turn.rewritten)
        turns.answered(answer)
        ids += encode(turns._tokenizer, answer)
    return ids, rewritten


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("template", [PLAIN, TRIMMED])
def test_tokens_are_those_of_the_template(tokenizer: Any, template: str, system: str | None) -> None:
    own = with_template(tokenizer, template)
    turns = Turns(own, system)
    ids, rewritten = talk_through(turns, ["one", "two", "three"])
    assert not any(rewritten)
    assert own.decode(ids) + "<eos>\n" == own.apply_chat_template(turns.messages, tokenize=False)


@pytest.mark.parametrize("template", [THINKING, COUNTED])
def test_a_template_that_writes_the_past_anew_is_noticed_and_harmless(tokenizer: Any, template: str) -> None:
    own = with_template(tokenizer, template)
    ids, rewritten = talk_through(Turns(own, None), ["<think>hm</think>one", "two", "three"])
    assert rewritten == [False, True, True]
    text = own.decode(ids)
    # What was said first is still there, in the words in which it was said.
    assert "<think>hm</think>one<eos>\n<|user|>\nquestion 1<eos>\n<|assistant|>\ntwo<eos>\n<|user|>\nquestion 2" in text


def test_white_space_around_an_answer_is_no_rewriting(tokenizer: Any) -> None:
    turns = Turns(with_template(tokenizer, TRIMMED), None)
    assert talk_through(turns, [" one\n", "two  ", ""])[1] == [False] * 3


def test_templates_that_cannot_work_are_explained(tokenizer: Any) -> None:
    turns = Turns(with_template(tokenizer, FORGETFUL), None)
    turns.begin(turns.next("hello"))
    turns.answered("hi")
    before = turns.messages
    with pytest.raises(UserError, match=r"leaves out earlier answers.*--no-chat-template"):
        turns.next("again")
    assert turns.messages == before
    with pytest.raises(UserError, match=r"no system.*--no-chat-template"):
        Turns(with_template(tokenizer, NO_SYSTEM), "Be brief.").next("hello")


def test_without_a_template_text_goes_on(tokenizer: Any) -> None:
    for own, wanted in [(with_template(tokenizer, PLAIN), False), (tokenizer, True)]:
        turns = Turns(own, "Be brief.", template=wanted)
        ids, rewritten = talk_through(turns, [" one", " two"])
        assert tokenizer.decode(ids) == "Be brief.\nquestion 0 one\nquestion 1 two" and not any(rewritten)
        assert Turns(own, "Be brief.", template=wanted).prefix() == len(encode(tokenizer, "Be brief.\n"))


def test_no_space_is_added_in_the_middle() -> None:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    alphabet = list("▁abcdefghijklmnopqrstuvwxyz\n")
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([Path(torch.__file__).read_text("utf-8")[:4000]], trainer)
    spacing = PreTrainedTokenizerFast(tokenizer_object=core)
    assert spacing.convert_ids_to_tokens(encode(spacing, "you"))[0].startswith("▁")
    assert not spacing.convert_ids_to_tokens(encode_after(spacing, "you"))[0].startswith("▁")


def test_notes_about_templates_on_the_screen(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    arguments = [
        "chat", "--model", str(tmp_path), "--device", "cpu", "--budget", "64", "--max-new-tokens", "4", "--prompt",
        "one", "--prompt", "two", "--prompt", "three",
    ]  # fmt: skip
    model.save_pretrained(tmp_path)
    for template, note in [(COUNTED, "the cache keeps what was read"), (None, "no chat template"), (PLAIN, None)]:
        with_template(tokenizer, template).save_pretrained(tmp_path)
        if template is None:
            (tmp_path / "chat_template.jinja").unlink()
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        assert result.output.count("note:") == (note is not None) and (note or "") in result.output


# ---- positions ------------------------------------------------------------------------------------------------------


def test_a_table_of_positions_ends(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=600, n_positions=96, n_embd=32, n_layer=1, n_head=2, bos_token_id=None)
    typed = ChatOptions(model="mine", device="cpu", budget=64, policy="paged_eviction", chat_template=False)
    settings = chat_settings(typed.but(max_new_tokens=500))
    conversation = Conversation(GPT2LMHeadModel(config).eval(), with_ends(tokenizer), settings)
    with pytest.raises(UserError, match=r"no positions for \d+ tokens.*begins anew"), Interrupt() as interrupt:
        conversation.answer(conversation.prepare("a b c"), Listener(tokenizer), interrupt)
    assert conversation.seen == 0 and conversation.ids == []


def with_ends(tokenizer: Any) -> Any:
    """Without a token that ends an answer."""
    changed = copy.deepcopy(tokenizer)
    changed.eos_token = None
    return changed


def test_rotary_positions_only_get_worse(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    short = copy.deepcopy(model)
    short.config.max_position_embeddings = 60
    short.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    words = f"chat --model {tmp_path} --device cpu --budget 48 --max-new-tokens 16".split()
    for message in ("a", "b c d e " * 8, "f"):
        words += ["--prompt", message]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert (
        result.exit_code == 0
        and result.output.count("further than the 60 tokens that this llama model was made for") == 1
    ), result.output
