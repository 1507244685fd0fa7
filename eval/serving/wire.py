"""What clients send, field by field: what is not written here is refused, and nothing is taken and ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..options.serve import Role

#: Most answers that one request may ask for.
MOST_ANSWERS = 64
_MOST_STOPS, _LONGEST_STOP = 16, 1000
#: Most spans of tokens that a request may protect.
_MOST_SPANS = 64

#: Fields of OpenAI's that change nothing at these values, and why other values are refused.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), "answers are not held to a grammar"),
    "tools": (([],), "tools are not called"),
    "tool_choice": (("none",), "tools are not called"),
    "parallel_tool_calls": ((True, False), "tools are not called"),
    "functions": (([],), "functions are not called"),
    "function_call": (("none",), "functions are not called"),
    "store": ((False,), "nothing is stored"),
    "modalities": ((["text"],), "answers are text"),
    "reasoning_effort": ((), "the model has no such setting"),
    "service_tier": (("auto", "default"), "all requests are alike"),
    "best_of": ((1,), "ask with n and choose"),
    "echo": ((False,), "log probabilities of prompts are not there"),
    "suffix": (("",), "text is written at the end only"),
    "min_tokens": ((0,), "it is not there"),
    "chat_template": ((), "a template is a program, and only that of the model is run"),
}


class Body(BaseModel):
    """Nothing but its fields, and no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """What somebody said."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        said = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": said}


class StreamOptions(Body):
    """How an answer is streamed."""

    include_usage: bool = False


def _check_stop(stop: str | list[str]) -> str | list[str]:
    words = [stop] if isinstance(stop, str) else stop
    if len(words) > _MOST_STOPS or not all(0 < len(word) <= _LONGEST_STOP for word in words):
        raise PydanticCustomError("stop", f"give at most {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters each")
    return stop


def _check_bias(bias: dict[str, float]) -> dict[str, float]:
    if not all(token.isascii() and token.isdigit() for token in bias) or not all(
        -100 <= value <= 100 for value in bias.values()
    ):
        raise PydanticCustomError("bias", "give numbers of tokens and for each a bias between -100 and 100")
    return bias


class Asked(Body):
    """What completions of both kinds may ask for. None: what the model's generation_config says."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], AfterValidator(_check_bias)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    stop: Annotated[str | list[str], AfterValidator(_check_stop)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    context: str | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, sent: Any) -> Any:
        if not isinstance(sent, dict):
            return sent
        kept = dict(sent)
        for name, (neutral, reason) in _NEUTRAL.items():
            if name in kept:
                value = kept.pop(name)
                if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
                    raise PydanticCustomError("unsupported", f"{name} is not served: {reason}", {"param": name})
        return kept

    @property
    def most(self) -> int | None:
        """New tokens."""
        return self.max_tokens

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

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    protect: list[Role] | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("logprobs", "it needs logprobs: true", {"param": "top_logprobs"})
        return self

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Asked):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    protect: list[Annotated[list[int], Field(min_length=2, max_length=2)]] | None = Field(None, max_length=_MOST_SPANS)

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
