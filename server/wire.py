"""What clients send, field by field: what is not written here is refused, and nothing is taken and ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from .options import Role

#: Most answers that one request may ask for.
MOST_ANSWERS = 64
_MOST_STOPS, _LONGEST_STOP = 16, 1000
#: Most spans of tokens that a request may protect.
_MOST_SPANS = 64
#: Most digits of the number of a token.
_DIGITS = 10

#: Fields of OpenAI's and vLLM's that change nothing at these values, and why other values are refused.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), "answers are not held to a grammar"),
    "parallel_tool_calls": ((True,), "how many calls the model writes is up to it"),
    "functions": ((), "functions are not called"),
    "function_call": (("none",), "functions are not called"),
    "store": ((False,), "nothing is stored"),
    "modalities": ((["text"],), "answers are text"),
    "reasoning_effort": ((), "the model has no such setting"),
    "verbosity": (("medium",), "the model has no such setting"),
    "service_tier": (("auto", "default"), "all requests are alike"),
    "best_of": ((1,), "ask with n and choose"),
    "suffix": (("",), "text is written at the end only"),
    "min_tokens": ((0,), "answers end where the model ends them"),
    "chat_template": ((), "a template is a program, and only that of the model is run"),
    "use_beam_search": ((False,), "there is no beam search"),
    "length_penalty": ((1,), "there is no beam search"),
    "early_stopping": ((False,), "there is no beam search"),
    "include_stop_str_in_output": ((False,), "texts end before what ends them"),
    "skip_special_tokens": ((True,), "texts leave special tokens out"),
    "spaces_between_special_tokens": ((True,), "texts leave special tokens out"),
    "add_generation_prompt": ((True,), "the model answers"),
    "continue_final_message": ((False,), "use /v1/completions to go on from a text"),
    "return_tokens_as_token_ids": ((False,), "tokens have names"),
    "return_token_ids": ((False,), "answers are text"),
    "include_reasoning": ((True,), "what the model writes is not taken apart"),
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
        kept = {}
        for name, value in sent.items():
            values, reason = cls.neutral.get(name, ((), ""))
            if name not in cls.model_fields and (value in (None, [], {}) or _is_among(value, values)):
                continue
            if reason:
                raise _mistake("unsupported", f"it is not served: {reason}", name)
            kept[name] = value
        return kept


def _is_among(value: Any, values: tuple[Any, ...]) -> bool:
    """As JSON compares: 1 is 1.0, and true is neither."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def _mistake(kind: str, said: str, param: str | None = None) -> PydanticCustomError:
    """With the field that it is about, if that is not the one that is read."""
    return PydanticCustomError(kind, "{said}", {"said": said, **({} if param is None else {"param": param})})


def _told_apart(kind_of: Callable[[Any], str | None], expected: str) -> Any:
    """Of several types the one that was meant is read, so that a mistake is told of that one."""
    return Discriminator(kind_of, custom_error_type="either", custom_error_message=expected)


#: What pydantic names the types by that it tells apart.
TAGS = frozenset(("<text>", "<list>", "<tokens>", "<lists>"))


def _text_or_list(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def _kind_of_prompt(value: Any) -> str | None:
    kind = _text_or_list(value)
    if kind != "<list>" or not value:
        return kind
    first = {str: "<list>", int: "<tokens>", list: "<lists>"}
    return first.get(type(value[0]), "<list>")


_CONTENT = "give a text, or a list of parts of the type text"


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, sent: Any) -> Any:
        if isinstance(sent, dict) and isinstance(sent.get("type"), str) and sent["type"] != "text":
            raise _mistake("unsupported", f"parts of type {sent['type']!r} are not served: messages are text")
        return sent


class Called(Body):
    """The function of a call, with its arguments as JSON."""

    name: str
    arguments: str

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates take it: the arguments as they are."""
        return {"name": self.name, "arguments": json.loads(self.arguments or "{}")}

    @model_validator(mode="after")
    def _check(self) -> Called:
        try:
            right = isinstance(self.plain["arguments"], dict)
        except (ValueError, RecursionError):
            right = False
        if not right:
            raise _mistake("json", "give an object in JSON", "arguments")
        return self


class ToolCall(Body):
    """What the model called before."""

    type: Literal["function"] = "function"
    id: str | None = None
    index: int | None = None
    function: Called


class Message(Body):
    """What somebody said, called, or what came of a call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<list>")],
            _told_apart(_text_or_list, _CONTENT),
        ]
        | None
    ) = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise _mistake("either", _CONTENT, "content")
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise _mistake("role", f"a message of {self.role!r} has none", name)
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        said = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": said}
        if self.tool_calls:
            plain["tool_calls"] = [
                {"type": "function", "id": call.id, "function": call.function.plain} for call in self.tool_calls
            ]
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

    neutral: ClassVar = {
        "include_obfuscation": ((False,), "pieces are sent as they are"),
    }
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _check_stop(stop: str | list[str]) -> str | list[str]:
    words = [stop] if isinstance(stop, str) else stop
    if len(words) > _MOST_STOPS or not all(0 < len(word) <= _LONGEST_STOP for word in words):
        raise _mistake("stop", f"give at most {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters each")
    return stop


def _check_bias(bias: dict[str, float]) -> dict[str, float]:
    if not all(token.isascii() and token.isdigit() and len(token) <= _DIGITS for token in bias) or not all(
        -100 <= value <= 100 for value in bias.values()
    ):
        raise _mistake("bias", "give numbers of tokens and for each a bias between -100 and 100")
    return bias


class Asked(Body):
    """What completions of both kinds may ask for. None: what the model's generation_config says."""

    neutral: ClassVar = _NEUTRAL
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], AfterValidator(_check_bias)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    stop: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[list[str], Tag("<list>")],
            _told_apart(_text_or_list, "give a text or a list of texts"),
            AfterValidator(_check_stop),
        ]
        | None
    ) = None
    stop_token_ids: list[int] | None = Field(None, max_length=_MOST_STOPS)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    context: str | None = None
    #: Tokens that it holds per layer, at most as many as the server gives to each.
    kv_budget: int | None = Field(None, ge=1)
    #: What requests with another one have left is not used.
    prompt_cache_key: str | None = None
    #: These ask for nothing.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    request_id: str | None = None

    @property
    def most(self) -> int | None:
        """New tokens."""
        return self.max_tokens

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Tools that the model is told of."""
        return []

    @property
    def echoes(self) -> bool:
        """Whether each answer begins with its prompt."""
        return False

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def alternatives(self) -> int | None:
        """How many tokens are named with their log probabilities besides the chosen one; None: no log probabilities."""
        raise NotImplementedError


class ChatRequest(Asked):
    """Body of `/v1/chat/completions`."""

    neutral: ClassVar = _NEUTRAL | {"echo": ((False,), "/v1/completions has it")}
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
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
            raise _mistake("logprobs", "it needs logprobs: true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise _mistake("max_tokens", "max_completion_tokens says something else: give one of them", "max_tokens")
        return self

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Asked):
    """Body of `/v1/completions`."""

    prompt: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[str], Tag("<list>")]
        | Annotated[list[int], Tag("<tokens>")]
        | Annotated[list[list[int]], Tag("<lists>")],
        _told_apart(_kind_of_prompt, "give a text, its tokens, or a list of either"),
    ]
    logprobs: int | None = Field(None, ge=0, le=20)
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    protect: list[Annotated[list[int], Field(min_length=2, max_length=2)]] | None = Field(None, max_length=_MOST_SPANS)

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise _mistake("max_tokens", "0 tokens are an answer only with echo: true", "max_tokens")
        return self

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def spans(self) -> list[tuple[int, int]] | None:
        """Of each prompt's tokens, which are never evicted."""
        return None if self.protect is None else [(start, end) for start, end in self.protect]

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more."""
        given: Any = self.prompt
        one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        return [given] if one else given

    @property
    def alternatives(self) -> int | None:
        return self.logprobs
