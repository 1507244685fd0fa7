"""Calls of tools come back as calls where the model tags them, and are read again."""

import json
import random
import re
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the extra `eval` is not installed")

import driving
from hf_paged_eviction_server.calls import Call, CallStream

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "well"}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} call as <tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def slow(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The whole text at once."""
    parts, calls = [""], []
    pieces = re.split(r"(<tool_call>.*?</tool_call>)", text, flags=re.DOTALL)
    for piece in pieces:
        call = Call.read(piece[11:-12]) if re.fullmatch("<tool_call>.*</tool_call>", piece, re.DOTALL) else None
        if call is None:
            parts[-1] += piece
        else:
            calls.append((call.name, call.arguments))
            parts.append("")
    if not calls:
        return text, []
    return parts[0].rstrip() + "".join(part.strip() for part in parts[1:]), calls


def test_any_pieces() -> None:
    draw = random.Random(0)
    letters = ["a", " ", "\n", "<", "<tool_call>", "</tool_call>", CALL, CALL, '<tool_call>{"name": 1}</tool_call>']
    for _ in range(2000):
        text = "".join(draw.choices(letters, k=draw.randint(0, 6)))
        if re.search(r"<tool_call>\s*\{[^<]*\}\s*$", text):
            continue  # the last tag may be missing
        stream, content, calls, rest = CallStream(), "", [], text
        while rest:
            count = draw.randint(1, 9)
            more, called = stream.add(rest[:count])
            content, calls, rest = content + more, calls + called, rest[count:]
        more, called = stream.end()
        assert (content + more, [(call.name, call.arguments) for call in calls + called]) == slow(text), text


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (CALL[: -len("</tool_call>")], "", ["look"]),
        ("So: <tool_call>{", "So: <tool_call>{", []),
        ("So: <tool", "So: <tool", []),
        (f"So:\n{CALL}\n{CALL}\n", "So:", ["look", "look"]),
        (f"{CALL} and {CALL} then", "andthen", ["look", "look"]),
        ("<tool_call>look()</tool_call>", "<tool_call>look()</tool_call>", []),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', None, []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None, []),
        # What no response can hold, or no request bring back.
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', None, []),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": {"\\ud800": 1}}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', None, []),
        (f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 300 + "]" * 300}}}}}</tool_call>', None, []),
    ],
)
def test_what_is_a_call(text: str, content: str | None, names: list[str]) -> None:
    for size in (1, len(text)):
        stream, shown, calls = CallStream(), "", []
        for at in range(0, len(text), size) if size > 1 or len(text) < 1000 else ():
            more, called = stream.add(text[at : at + size])
            shown, calls = shown + more, calls + called
        more, called = stream.end()
        if size > 1 or len(text) < 1000:
            assert (shown + more, [call.name for call in calls + called]) == (
                text if content is None else content,
                names,
            )


@pytest.mark.parametrize("depth", range(190, 210))
def test_a_call_can_be_sent_back(depth: int) -> None:
    from hf_paged_eviction_server.wire import Called

    nested = "[" * depth + "]" * depth
    call = Call.read(f'{{"name": "f", "arguments": {{"a": {nested}, "b": "\\ud83d\\ude00"}}}}')
    if call is not None:
        assert Called(name=call.name, arguments=call.arguments).arguments["b"] == "\N{GRINNING FACE}"
    assert call is not None or depth > 190


@pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)
def test_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and streamed; without tools, or where they are not offered, the same is text; calls and results go back."""
    import talking
    import torch

    from hf_paged_eviction_server.sampling import Sampler

    _, tokenizer = talking.embedded()
    script: list[int] = []

    def write(text: str) -> str:
        """What the model says from now on."""
        script[:] = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return text

    write(f"Let me see.\n{CALL}\n{CALL}")
    messages: list[Any] = [{"role": "user", "content": "Where is the key?"}]
    arguments: dict[str, Any] = {"model": "embedded", "messages": messages, "max_tokens": 200}
    with talking.serving(budget=64, pages=12) as served:
        prompts = served.server.config.app.state.served.prompts
        monkeypatch.setattr(Sampler, "choose", lambda self, logits, prompt, answer: torch.tensor([script[len(answer)]]))
        for tokenizer_of in (prompts._encoder, prompts._tokenizer):
            monkeypatch.setattr(tokenizer_of, "chat_template", TEMPLATE)
        create = served.client.chat.completions.create
        choice = create(**arguments, tools=TOOLS).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        calls = choice.message.tool_calls
        assert [(call.type, call.function.name) for call in calls] == [("function", "look")] * 2
        assert [json.loads(call.function.arguments) for call in calls] == [{"at": "well"}] * 2
        assert len({call.id for call in calls}) == 2

        parts = [part.choices[0] for part in create(**arguments, tools=TOOLS, n=2, stream=True)]
        for index in range(2):
            own = [part for part in parts if part.index == index]
            assert "".join(part.delta.content or "" for part in own) == "Let me see."
            streamed = [call for part in own for call in part.delta.tool_calls or []]
            assert [(call.index, call.function.name) for call in streamed] == [(0, "look"), (1, "look")]
            assert own[-1].finish_reason == "tool_calls"

        written = write(f"Let me see.\n{CALL}")
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = create(**arguments, **more).choices[0]
            assert (choice.message.content, choice.message.tool_calls) == (written, None)
            assert choice.finish_reason == "stop"
        cut = create(**arguments | {"max_tokens": 12}, tools=TOOLS).choices[0]
        assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
        assert written.startswith(cut.message.content)

        seen: list[str] = []
        text = prompts._text
        monkeypatch.setattr(prompts, "_text", lambda special, chat: (seen.append(chat), text(special, chat))[1])
        results = [{"role": "tool", "tool_call_id": call.id, "content": "a key"} for call in calls]
        answer = create(**arguments | {"messages": [*messages, *_answer(calls), *results]}, tools=TOOLS).choices[0]
        assert answer.finish_reason == "tool_calls"
        call = '<tool_call>{"name": "look", "arguments": {"at": "well"}}</tool_call>'
        assert seen[0].endswith(f"<assistant>{call}{call}<tool>a key<tool>a key<assistant>")
        talking.wait_until_free(served)


def _answer(calls: list[Any]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": None, "tool_calls": [call.model_dump() for call in calls]}]
