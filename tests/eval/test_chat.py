"""The chat as a person, a pipe and a program use it."""

from __future__ import annotations

import re
import signal
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.text import Text
from transformers import DynamicCache

import invoking
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.learned.calibration import shelf, shelf_name
from hf_paged_eviction.naming.sizes import readable_bytes
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.chat import session as session_module
from hf_paged_eviction_eval.chat.answering import Interrupt, Listener
from hf_paged_eviction_eval.chat.blocks import BlockMap, LayerBlocks, strip
from hf_paged_eviction_eval.chat.conversation import Conversation
from hf_paged_eviction_eval.chat.demo import demo_turns
from hf_paged_eviction_eval.chat.figures import Footprint
from hf_paged_eviction_eval.chat.screen import Screen
from hf_paged_eviction_eval.chat.settings import chat_settings
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.chat import ChatOptions
from hf_paged_eviction_eval.running.efficiency import kv_bytes

FACT = "The code of maple is amber. The code of cedar is coral."
MAPLE = "What is the code of maple? The code of maple is"
CEDAR = "What is the code of cedar? The code of cedar is"


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return embedded.load()


@pytest.fixture(autouse=True)
def load_once(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded[0].set_attn_implementation("sdpa")
    load = session_module.load
    monkeypatch.setattr(session_module, "load", lambda made: loaded if made.model == "embedded" else load(made))


class Silent(Listener):
    """Hears everything, says nothing, and may do something at a token."""

    def __init__(self, at_token: int = 0, at_reading: int = 0) -> None:
        super().__init__(embedded.load()[1])
        self.at_token, self.at_reading, self.pieces = at_token, at_reading, [""]

    def reading(self, done: int, total: int) -> None:
        if self.at_reading and done >= self.at_reading:
            signal.raise_signal(signal.SIGINT)
            self.at_reading = 0

    def token(self) -> None:
        if self.count == self.at_token:
            signal.raise_signal(signal.SIGINT)

    def text(self, piece: str) -> None:
        self.pieces.append(piece)


def talk(loaded: tuple[Any, Any], **options: Any) -> Conversation:
    return Conversation(*loaded, chat_settings(ChatOptions(**options)))


def say(conversation: Conversation, message: str, listener: Silent | None = None) -> Any:
    with Interrupt() as interrupt:
        return conversation.answer(conversation.prepare(message), listener or Silent(), interrupt)


run = partial(invoking.run, "chat")


# ---- the conversation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [16, 512])
def test_turns_equal_one_run_of_a_full_cache_over_all_tokens(loaded: tuple[Any, Any], chunk: int) -> None:
    conversation = talk(loaded, budget=4096, max_new_tokens=12, prefill_chunk_size=chunk)
    model, tokenizer = loaded
    for turn in list(demo_turns(tokenizer, 1))[:3]:
        listener, before = Silent(), len(conversation.ids)
        answer = say(conversation, turn.message, listener)
        assert turn.is_right(answer.text) and answer.ending == "end"
        prompt = len(conversation.ids) - len(answer.tokens) + 1
        ids = torch.tensor([conversation.ids[:prompt]])
        fresh = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=DynamicCache(config=model.config),
            max_new_tokens=12, do_sample=False,
        )  # fmt: skip
        assert fresh[0, prompt:].tolist() == answer.tokens
        assert "".join(listener.pieces) == answer.text == tokenizer.decode(answer.tokens, skip_special_tokens=True)
        # Every token was fed once: what was there stays, and the cache has seen all but nothing else.
        assert conversation.seen == len(conversation.ids) and before < prompt
        assert answer.read == prompt - before
    text = tokenizer.apply_chat_template(conversation.turns.messages, tokenize=False)
    assert tokenizer.decode(conversation.ids) + "<eos>" == text


@pytest.mark.parametrize("size", [{"budget": "256"}, {"budget": "512KiB"}], ids=str)
def test_a_calibrated_model_chats_with_what_a_cache_takes_by_itself(
    loaded: tuple[Any, Any], size: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path))
    shelf().mkdir(parents=True)
    config = loaded[0].config
    (shelf() / str(shelf_name(config))).write_bytes(embedded.calibration_path().read_bytes())
    options = chat_settings(ChatOptions(**size))
    assert options.attn_implementation == PAGED_EVICTION
    loaded[0].set_attn_implementation(PAGED_EVICTION)
    conversation, alone = Conversation(*loaded, options), PagedEvictionCache(config, budget=256)
    assert repr(conversation.cache) == repr(alone)
    assert conversation.policy == f"{alone.policy.label}@global"
    assert conversation.cache.paged_layers[0][1].budget == alone.paged_layers[0][1].budget


def test_the_figures_are_true(loaded: tuple[Any, Any]) -> None:
    conversation = talk(loaded, budget=128, policy="keydiff", prefill_chunk_size=100, full=True, max_new_tokens=6)
    model, _ = loaded
    held = []
    hook = model.register_forward_hook(lambda *_: held.append(conversation.cache.layers[-1].held))
    turns = list(demo_turns(loaded[1], 0))[:3]
    answers = [say(conversation, turn.message) for turn in turns]
    hook.remove()
    assert held and max(held) <= 128
    stats, footprint = conversation.cache.stats(), answers[-1].footprint
    assert footprint == Footprint.of(conversation.cache)
    assert (footprint.seen, footprint.held, footprint.budget) == (stats.seen, stats.held, stats.budget)
    assert (footprint.seen - footprint.held) * len(stats.layers) == stats.evicted_tokens
    assert footprint.kv_bytes == stats.storage_bytes == kv_bytes(conversation.cache)
    full = DynamicCache(config=model.config)
    model(torch.tensor([conversation.ids]), past_key_values=full)
    assert footprint.full_bytes == kv_bytes(full)
    for answer, turn in zip(answers, turns, strict=True):
        assert (
            turn.is_right(answer.full.text)
            and answer.full.tokens[: answer.full.same] == answer.tokens[: answer.full.same]
        )
        assert (answer.full.tokens == answer.tokens) == (
            answer.full.same == len(answer.tokens) == len(answer.full.tokens)
        )


def test_looking_changes_nothing(loaded: tuple[Any, Any]) -> None:
    answers = []
    for look in (False, True):
        conversation = talk(loaded, budget=64, policy="h2o", max_new_tokens=20)
        for turn in list(demo_turns(loaded[1], 2))[:3]:
            answers.append(say(conversation, turn.message).tokens)
            if look:
                for layer, _ in conversation.cache.paged_layers:
                    conversation.cache.block_scores(layer)
    assert answers[:3] == answers[3:]


def test_ctrl_c_while_answering(loaded: tuple[Any, Any]) -> None:
    conversation = talk(loaded, budget=64, max_new_tokens=60, chat_template=False)
    before = signal.getsignal(signal.SIGINT)
    answer = say(conversation, "import os\nimport sys\n\nclass Foo:\n", Silent(at_token=5))
    assert signal.getsignal(signal.SIGINT) == before
    assert answer.ending == "stopped" and len(answer.tokens) in (5, 6)
    # The last token was chosen but not fed; the next turn feeds it first.
    assert {layer.get_seq_length() for layer in conversation.cache.layers} == {len(conversation.ids) - 1}
    uncut = talk(loaded, budget=64, max_new_tokens=len(answer.tokens), chat_template=False)
    assert say(uncut, "import os\nimport sys\n\nclass Foo:\n").tokens == answer.tokens
    for each in (uncut, conversation):
        say(each, f"{FACT}\n{MAPLE}")
    shorter = min(len(uncut.ids), len(conversation.ids))
    assert uncut.ids[:shorter] == conversation.ids[:shorter] and shorter > 40


def test_ctrl_c_while_reading(loaded: tuple[Any, Any]) -> None:
    conversation = talk(loaded, budget=4096, max_new_tokens=6, prefill_chunk_size=32)
    first, second = list(demo_turns(loaded[1], 0))[:2]
    answer = say(conversation, first.message, Silent(at_reading=60))
    assert answer.ending == "unread" and answer.text == "" and answer.read == 64
    assert {layer.get_seq_length() for layer in conversation.cache.layers} == {64}
    assert second.is_right(say(conversation, second.message).text)
    assert conversation.seen == len(conversation.ids)


def test_the_second_ctrl_c_raises() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.wanted
        signal.raise_signal(signal.SIGINT)


def test_out_of_memory_begins_anew(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = talk(loaded)
    say(conversation, f"{FACT}\n{MAPLE}")

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room for 3 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(loaded[0], "generate", full)
        with pytest.raises(UserError, match=r"no room for 3 GiB.*--prefill-chunk-size"):
            say(conversation, CEDAR)
    assert conversation.seen == 0 and conversation.ids == []
    assert "amber" in say(conversation, f"{FACT}\n{MAPLE}").text


def test_a_full_cache_draws_the_same(loaded: tuple[Any, Any]) -> None:
    conversation = talk(loaded, budget=4096, temperature=1.5, max_new_tokens=8, full=True)
    for _ in range(2):
        answer = say(conversation, "import os")
        assert answer.full.tokens == answer.tokens and answer.full.same == len(answer.tokens)


def test_the_map_shows_what_is_held(loaded: tuple[Any, Any]) -> None:
    conversation = talk(loaded, budget=64, policy="keydiff", max_new_tokens=6)
    say(conversation, next(demo_turns(loaded[1], 0)).message)
    cache = conversation.cache
    held = [set(layer.positions[0, 0].tolist()) for _, layer in cache.paged_layers]
    picture, width = BlockMap(cache), conversation.seen + 10
    say(conversation, CEDAR)  # the picture stays as it was
    console = Console(file=StringIO(), width=width, color_system="truecolor", force_terminal=True)
    with console.capture() as capture:
        console.print(picture)
    lines = Text.from_ansi(capture.get()).split()
    for layer, positions in enumerate(held):
        row = lines[layer].plain[10:]
        assert {place for place, character in enumerate(row) if character == "█"} == positions and len(positions) == 64
        assert lines[layer].get_style_at_offset(console, 10).color.number == 4


def test_the_lowest_block_goes_next(loaded: tuple[Any, Any]) -> None:
    conversation = talk(loaded, budget=64, policy="keydiff", max_new_tokens=6)
    say(conversation, next(demo_turns(loaded[1], 0)).message)
    layer = conversation.cache.layers[0]
    blocks = LayerBlocks.of(0, layer)
    free = blocks.scores[0].masked_fill(blocks.protected[0], float("inf"))
    doomed = set(blocks.positions[0, int(free.argmin())].tolist())
    assert doomed <= set(layer.positions[0, 0].tolist())
    picture = strip(blocks, conversation.seen, conversation.seen, " 12345678")
    colours = [picture.get_style_at_offset(Console(), place).color for place in doomed]
    assert {colour.name for colour in colours if colour is not None} == {"red"}
    with torch.inference_mode():
        for _ in range(2 * 16):  # the block that is being overwritten, and the next one
            loaded[0](torch.tensor([[5]]), past_key_values=conversation.cache)
    assert not doomed & set(layer.positions[0, 0].tolist())


def test_sampling_depends_on_the_seed_and_nothing_else(loaded: tuple[Any, Any]) -> None:
    def drawn(seed: int, temperature: float = 1.5) -> list[int]:
        conversation = talk(loaded, seed=seed, temperature=temperature, top_p=0.95, max_new_tokens=16)
        tokens: list[int] = say(conversation, "import os").tokens
        return tokens

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1, temperature=0.0) == drawn(2, temperature=0.0)


def test_protected_system_message(loaded: tuple[Any, Any]) -> None:
    rules = f"{FACT} The code of walnut is azure."
    conversation = talk(loaded, system=rules, protect="system", policy="recency", budget=96, max_new_tokens=6)
    length = len(loaded[1](f"{rules}\n")["input_ids"])
    assert conversation.turns.prefix() == length > 16
    for turn in list(demo_turns(loaded[1], 3))[1:3]:
        say(conversation, turn.message)
    held = conversation.cache.layers[0].positions[0, 0].tolist()
    assert set(range(length)) <= set(held) and conversation.cache.stats().held == 96
    assert "amber" in say(conversation, MAPLE).text


def test_what_the_user_said_last_stays(loaded: tuple[Any, Any]) -> None:
    conversation = talk(loaded, protect="last_user", policy="recency", budget=96, max_new_tokens=6, block_size=4)
    message, spans = f"The code of walnut is azure. {FACT} The code of birch is olive. {MAPLE}", list[set[int]]()
    for _ in range(5):
        start = len(conversation.ids)
        spans.append(set(range(start, start + len(conversation.prepare(message).ids))))
        say(conversation, message)
        assert spans[-1] <= set(conversation.cache.layers[0].positions[0, 0].tolist())
    assert not spans[0] <= set(conversation.cache.layers[0].positions[0, 0].tolist())
    with pytest.raises(UserError, match=r"--protect last_user: budget=96 .*Smallest legal budget: \d+"):
        say(conversation, message * 9)


# ---- as a command ---------------------------------------------------------------------------------------------------


def test_piped_messages_give_one_line_each() -> None:
    result = run("--budget", "64", stdin=f"{FACT} {MAPLE}\n\n/blocks\n{CEDAR}\n")
    assert result.stdout == "amber\ncoral\n"
    assert "\x1b" not in result.output
    assert "layer" in result.stderr and result.stderr.count(" held, ") == 2


def test_ctrl_c_ends_what_nobody_watches(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    generate = loaded[0].generate

    def pressed(*arguments: Any, **settings: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return generate(*arguments, **settings)

    monkeypatch.setattr(loaded[0], "generate", pressed)
    result = run("--prompt", f"{FACT} {MAPLE}", "--prompt", "/blocks", status=130)
    assert "what was read and said stays" in result.output and "layer" not in result.output
    assert "the demonstration ends here" in run("--demo", "--prompt", "/blocks", status=130).output


def test_line_breaks_stay_in_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(piped=True).print_answer("one two\n" + "\nthree " * 9)
    assert capsys.readouterr().out == "one two\\n" + "\\nthree " * 9 + "\n"


def test_printed_figures_are_those_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    talks: list[Conversation] = []
    begin = Conversation.begin
    monkeypatch.setattr(Conversation, "begin", lambda self: (talks.append(self), begin(self))[1])
    result = run("--demo", "--policy", "keydiff")
    (conversation,) = talks
    stats, footprint = conversation.cache.stats(), Footprint.of(conversation.cache)
    lines = re.findall(
        r"\[([\d,]+)/256 held, ([\d,]+) evicted, ([\d,]+) seen, KV (.+?), full cache (.+?)\]", result.output
    )
    assert len(lines) == 6 and all(int(line[0]) <= 256 for line in lines)
    held, evicted, seen, size, full = lines[-1]
    assert (held, seen) == (str(stats.held), f"{stats.seen:,}") and size == readable_bytes(stats.storage_bytes)
    assert evicted == f"{stats.evicted_tokens // len(stats.layers):,}" and full == readable_bytes(footprint.full_bytes)
    assert "6 of 6 right with keydiff" in result.output
    assert conversation.turns.messages[1]["role"] == "assistant" and len(conversation.ids) == stats.seen


def test_prompts_and_commands(tmp_path: Path) -> None:
    commands = (
        f"/help|{FACT} {MAPLE}|/blocks|/budget|/budget 48|{CEDAR}|/reset|/budget 128|//{FACT} {MAPLE}|/exit|never"
    )
    typed = [word for command in commands.split("|") for word in ("--prompt", command)]
    result = run("--full", "--policy", "keydiff", *typed)
    text = result.output
    assert text.count("amber") >= 2 and "coral" in text and "never" not in text
    assert "full cache (" in text and "the same answer" in text
    assert "a new conversation with a budget of 256" in text and "/48 held" in text and "0/128 held" in text
    assert re.search(r"layer 3 +█", text) and "share of the tokens" in text


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("/nope", "/help lists them"),
        ("/block", "did you mean /blocks?"),
        ("/blocks", "write a message first"),
        ("/budget many", "such as /budget 256"),
        ("/budget 100", "nearest legal"),
        (" ", "the message is empty"),
    ],
)
def test_mistakes_in_messages_are_explained(typed: str, message: str) -> None:
    result = run("--prompt", typed, status=2)
    assert message in result.output and "Traceback" not in result.output


def test_a_budget_cannot_grow() -> None:
    assert "evicted tokens cannot come back" in run(stdin=f"{FACT} {MAPLE}\n/budget 512\n", status=2).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--policy nope", "paged_eviction"),
        ("--policy keydiff,recency", "name one policy"),
        ("--policy full", "name one policy"),
        ("--policy oracle", "looks ahead"),
        ("--policy h2o --attn-implementation sdpa", "needs to see queries"),
        ("--budget 100", "nearest legal: 96 or 112"),
        ("--budget 32", "Smallest legal budget: 48"),
        ("--protect system", "--system TEXT"),
        ("--system @/no/such/file", "No such file"),
        ("--prompt @/no/such/file", "No such file"),
        ("--tokenizer x", "leave out --tokenizer"),
        ("--device nowhere", "nowhere"),
        ("--temperature -1", "temperature"),
    ],
)
def test_mistakes_in_options_are_explained(arguments: str, message: str) -> None:
    result = run(*arguments.split(), stdin="hello\n", status=2)
    assert message in result.output and "Traceback" not in result.output


def test_protected_system_message_needs_room() -> None:
    words = " ".join(["The code of maple is amber."] * 20)
    result = run("--system", words, "--protect", "system", "--budget", "64", "--prompt", MAPLE, status=2)
    assert re.search(r"sink_tokens=\d+.*Smallest legal budget: \d+", result.output)


def test_a_pipe_that_is_no_text_or_empty() -> None:
    assert "utf-8" in run(stdin=b"caf\xe9\n", status=2).stderr
    assert "the message is empty" in run(stdin="\n", status=2).stderr


@pytest.mark.parametrize("policy", ["h2o@pyramid", "snapkv@ada_kv", "hybrid(snapkv, keydiff)", "calibrated:embedded"])
def test_policies_that_see_queries_and_unequal_shares(policy: str, loaded: tuple[Any, Any]) -> None:
    turns = [turn.message for turn in demo_turns(loaded[1], 0)][:2]
    prompts = [word for line in (*turns, "/blocks") for word in ("--prompt", line)]
    result = run("--policy", policy, "--budget", "64", "--max-new-tokens", "8", *prompts, columns=60)
    assert "64/64 held" in result.output and "layer 3" in result.output
