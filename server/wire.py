"""What clients send, field by field: what is not written here is refused, and nothing is taken and ignored.

Every text and number of a body is checked here, before anything reads it: the thread that generates for all requests
gets nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Json,
    Strict,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .options import Role

#: Most answers that one request may ask for.
MOST_ANSWERS = 64
_MOST_STOPS, _LONGEST_STOP = 16, 1000
#: Most spans of tokens that a request may protect.
_MOST_SPANS = 64

#: Fields of OpenAI's and vLLM's that change nothing at these values, and why other values are refused.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), "structured output is not implemented"),
    "parallel_tool_calls": ((True,), "the model decides how many tools it calls"),
    "functions": ((), "use tools instead"),
    "function_call": (("none",), "use tools instead"),
    "store": ((False,), "the server stores no answers"),
    "modalities": ((["text"],), "answers are text only"),
    "reasoning_effort": ((), "the model has no such setting"),
    "verbosity": (("medium",), "the model has no such setting"),
    "service_tier": (("auto", "default"), "all requests are served with the same priority"),
    "best_of": ((1,), "request several answers with n and choose one yourself"),
    "suffix": (("",), "text can only be added at the end"),
    "min_tokens": ((0,), "the model decides where an answer ends"),
    "chat_template": ((), "a template is a program, and the server runs only that of its model"),
    "use_beam_search": ((False,), "there is no beam search"),
    "length_penalty": ((1,), "there is no beam search"),
    "early_stopping": ((False,), "there is no beam search"),
    "include_stop_str_in_output": ((False,), "stop strings are left out of the text"),
    "skip_special_tokens": ((True,), "special tokens are left out of the text"),
    "spaces_between_special_tokens": ((True,), "special tokens are left out of the text"),
    "add_generation_prompt": ((True,), "the last message is always answered"),
    "continue_final_message": ((False,), "use /v1/completions to continue a text"),
    "return_tokens_as_token_ids": ((False,), "tokens are returned as text"),
    "return_token_ids": ((False,), "answers are text only"),
    "include_reasoning": ((True,), "reasoning is not separated from the answer"),
    "priority": ((0,), "requests are served in the order of their arrival"),
}


class Body(BaseModel):
    """Nothing but its fields, and no conversions. What asks for nothing is dropped: clients send all that they know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, sent: Any) -> Any:
        if not isinstance(sent, dict):
            return sent
        fields = {}
        for name, value in sent.items():
            values, reason = cls.neutral.get(name, ((), ""))
            if name not in cls.model_fields and (_asks_for_nothing(value) or _is_among(value, values)):
                continue
            if reason:
                raise _mistake("unsupported", f"this value is not supported: {reason}", name)
            fields[name] = value
        return fields


def _asks_for_nothing(value: Any) -> bool:
    """Null, an empty list, or a table of these, such as other servers add to the answers that clients send back."""
    if isinstance(value, dict):
        return all(inner is None or inner in ([], {}) for inner in value.values())
    return value is None or value == []


def _check_values(sent: Any) -> None:
    """Refuse texts without bytes and numbers that are none, wherever they stand in a body."""
    waiting: list[tuple[str, Any]] = [("", sent)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(_inside(place, name), name) for name in value]
            waiting += [(_inside(place, name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}[{at}]", inner) for at, inner in enumerate(value)]
        elif isinstance(value, str) and not _has_bytes(value):
            reason = "the text is not valid Unicode: it has a lone surrogate"
            raise _mistake("unicode", reason, place)
        elif isinstance(value, float) and not math.isfinite(value):
            raise _mistake("finite", "must be a finite number", place)


def _inside(place: str, name: str) -> str:
    """A place that can be shown, whatever a client calls a field."""
    return f"{place}.{name}".lstrip(".").encode("utf-8", "replace").decode()


def _has_bytes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole(sent: Any) -> Any:
    """JSON has one kind of numbers: 16.0 is 16."""
    return int(sent) if isinstance(sent, float) and sent.is_integer() else sent


Whole = Annotated[int, BeforeValidator(_whole, json_schema_input_type=int)]


def _is_among(value: Any, values: tuple[Any, ...]) -> bool:
    """As JSON compares: 1 is 1.0, and true is neither."""
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in values)


def _mistake(kind: str, reason: str, param: str | None = None) -> PydanticCustomError:
    """With the field that it is about, if that is not the one that is read."""
    return PydanticCustomError(kind, "{reason}", {"reason": reason, **({} if param is None else {"param": param})})


def _kind_of_prompt(value: Any) -> str | None:
    if not isinstance(value, list):
        return "<text>" if isinstance(value, str) else None
    return {int: "<tokens>", list: "<lists>"}.get(type(value[0]) if value else str, "<texts>")


#: What pydantic names types and keys by, besides fields and places. Of several types the one that was meant is read, so
#: that a mistake is told of that one.
TAGS = frozenset(("<text>", "<texts>", "<tokens>", "<lists>", "[key]"))
_CONTENT = "must be a string, or a list of parts of type text"


def _parts(sent: Any) -> Any:
    """A text is one part."""
    if isinstance(sent, str):
        return [{"type": "text", "text": sent}]
    if sent is None or isinstance(sent, list):
        return sent
    raise _mistake("either", _CONTENT)


class TextPart(Body):
    """A part of a message."""

    neutral: ClassVar = {"cache_control": (({"type": "ephemeral"},), "the server decides which prompts it keeps")}
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, sent: Any) -> Any:
        if isinstance(sent, dict) and isinstance(sent.get("type"), str) and sent["type"] != "text":
            raise _mistake("unsupported", f"parts of type {sent['type']!r} are not supported: messages are text only")
        return sent


def _json(sent: Any) -> Any:
    """An empty text means no arguments."""
    return "{}" if sent == "" else sent


class Called(Body):
    """The function of a call, with its arguments as JSON."""

    name: str
    arguments: Annotated[Json[dict[str, Any]], BeforeValidator(_json, json_schema_input_type=str)]


class ToolCall(Body):
    """What the model called before."""

    type: Literal["function"] = "function"
    id: str | None = None
    index: Whole | None = None
    function: Called


class Message(Body):
    """A message of a conversation, with tool calls or the result of one."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart] | None, BeforeValidator(_parts, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise _mistake("either", _CONTENT, "content")
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise _mistake("role", f"not allowed in a message of role {self.role!r}", name)
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        text = "".join(part.text for part in self.content or ())
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump(include={"type", "id", "function"}) for call in self.tool_calls]
        more = {"name": self.name, "tool_call_id": self.tool_call_id}
        return plain | {name: value for name, value in more.items() if value is not None}


class Function(BaseModel):
    """What the model may call; what else is said of it is for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    name: str


class Tool(Body):
    """What the model may call."""

    type: Literal["function"]
    function: Function


class StreamOptions(Body):
    """How an answer is streamed."""

    neutral: ClassVar = {"include_obfuscation": ((False,), "pieces are sent without padding")}
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _stops(sent: Any) -> Any:
    """A text is one, null is none."""
    return [sent] if isinstance(sent, str) else [] if sent is None else sent


class GenerationRequest(Body):
    """What completions of both kinds may ask for. None: what the model's generation_config says."""

    neutral: ClassVar = _NEUTRAL
    model: str | None = None
    max_tokens: Whole | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    #: 0: the most likely token only.
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Whole | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**63)
    n: Whole | None = Field(None, ge=1, le=MOST_ANSWERS)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]],
        Field(max_length=_MOST_STOPS),
        BeforeValidator(_stops, json_schema_input_type=str | list[str] | None),
    ] = []
    stop_token_ids: list[Whole] | None = Field(None, max_length=_MOST_STOPS)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    context: str | None = None
    #: Number of tokens held per layer, at most the budget of the server.
    kv_budget: Whole | None = Field(None, ge=1)
    #: Requests share beginnings of prompts only if this value is equal.
    prompt_cache_key: str | None = None
    #: Fields that are accepted and have no effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    request_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, sent: Any) -> Any:
        _check_values(sent)
        return sent

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Tools for the chat template."""
        return []

    @property
    def echoes(self) -> bool:
        """Whether each answer begins with its prompt."""
        return False

    @property
    def alternatives(self) -> int | None:
        """How many tokens are named with their log probabilities besides the chosen one; None: no log probabilities."""
        raise NotImplementedError


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    neutral: ClassVar = _NEUTRAL | {"echo": ((False,), "use /v1/completions")}
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Whole | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    protect: list[Role] | None = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else [tool.model_dump() for tool in self.tools or ()]

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise _mistake("logprobs", "requires logprobs: true", "top_logprobs")
        most = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(most) > 1:
            raise _mistake("max_tokens", "differs from max_completion_tokens: give one of them", "max_tokens")
        self.max_tokens = next(iter(most), None)
        return self

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[str], Tag("<texts>")]
        | Annotated[list[int], Tag("<tokens>")]
        | Annotated[list[list[int]], Tag("<lists>")],
        Discriminator(
            _kind_of_prompt,
            custom_error_type="either",
            custom_error_message="must be a string, a list of token ids, or a list of either",
        ),
    ]
    logprobs: Whole | None = Field(None, ge=0, le=20)
    max_tokens: Whole | None = Field(None, ge=0)
    echo: bool | None = None
    #: Spans of each prompt's tokens, which are never evicted.
    protect: list[Annotated[tuple[int, int], Strict(False)]] | None = Field(None, max_length=_MOST_SPANS)

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise _mistake("max_tokens", "0 is allowed only with echo: true", "max_tokens")
        return self

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more."""
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if one else prompt

    @property
    def alternatives(self) -> int | None:
        return self.logprobs
