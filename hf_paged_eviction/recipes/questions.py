"""Answer several questions about one context, which is read once."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from os.path import commonprefix  # works with any sequences
from typing import Any, overload

import torch
from torch import Tensor

from ..cache import PagedEvictionCache
from ..integration.cache_argument import CACHE_ARGUMENT
from ..integration.feeding import feed
from ..integration.generation import check_names, effective, generate_settings
from ..integration.kept_state import aside, check_states_in_cache, forget_last_text
from ..integration.weights import register_weights, registered_digest, without_parallel
from ..options.cache_options import AUTO, CacheOptions, budget_of_text
from ..policies import EvictionPolicy
from ..table.budget import whole_number

#: Arguments of `generate` that `ask` makes, besides the settings in `ANSWERS_AS_TOKENS`.
_MADE_HERE = frozenset("inputs input_ids inputs_embeds attention_mask position_ids cache past_key_values".split())
#: Test questions for the chat template.
_BEGINNINGS = ("A", "1", "\n", " a")
_MAX_NEW_TOKENS = 256


@overload
def ask(
    model: Any,
    tokenizer: Any,
    context: str,
    questions: str,
    budget: int | str,
    policy: str | EvictionPolicy = AUTO,
    **options: Any,
) -> str: ...


@overload
def ask(
    model: Any,
    tokenizer: Any,
    context: str,
    questions: Sequence[str],
    budget: int | str,
    policy: str | EvictionPolicy = AUTO,
    **options: Any,
) -> list[str]: ...


@torch.no_grad()
def ask(
    model: Any,
    tokenizer: Any,
    context: str,
    questions: str | Sequence[str],
    budget: int | str,
    policy: str | EvictionPolicy = AUTO,
    *,
    max_new_tokens: int | None = None,
    chunk_size: int = 512,
    separator: str = "\n\n",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> str | list[str]:
    """Read a text once, compress it, and answer each question from the compressed cache.

    >>> ask(model, tokenizer, report, ["Who wrote it?", "When?"], budget=1024)  # doctest: +SKIP

    The text is compressed before any question is known. Each question starts from its own copy of the compressed cache,
    so questions do not see each other. If the tokenizer has a chat template, text and question form one user message;
    everything before the question is read once.

    Args:
        model: a decoder. Policies that look at attention need `model.set_attn_implementation("paged_eviction")`.
        tokenizer: the model's tokenizer.
        context: the text that the questions are about.
        questions: one question, or a list.
        budget: number of tokens held per layer, a share of the context ("25%") or bytes ("2GiB"); see `CacheOptions`.
        policy: see `CacheOptions`. For "auto" the weights are registered (`register_weights`), unless they already are.
        max_new_tokens: most tokens of an answer. None = as `generation_config=` or the model's own says, else 256.
        chunk_size: tokens of the context per forward. A layer never holds more than the budget and one chunk.
        separator: text between context and question.
        chat_template_kwargs: arguments of the chat template, such as `{"enable_thinking": False}`.
        **options: fields of `CacheOptions` go to the cache, all others to `generate`. Whether answers are sampled
            depends on `do_sample` and `model.generation_config`; an answer also ends with a string of `stop_strings`.
            Assisted decoding (`prompt_lookup_num_tokens` and others) is refused, and switched off where the checkpoint
            brings it. Tensors, such as the pixels of an image, are refused.

    Returns:
        The answer without special tokens; for a list of questions, a list of answers.

    Raises:
        TypeError, ValueError: a text is empty or not a string; the chat template fails or does not put the context
            before the question; `options` has a tensor or an option of `generate` that `ask` sets itself; the policy
            needs a probe; the model keeps a recurrent state outside of the cache; or the cache or `generate` refuses
            its options.
    """
    model = without_parallel(model)
    _check_pair(model, tokenizer)
    texts = _checked(context, questions)
    whole_number("chunk_size", chunk_size, 1)
    if wrong := sorted(_MADE_HERE & options.keys()):
        raise ValueError(f"ask sets {', '.join(wrong)} itself: leave it out, or call generate.")
    if tensors := sorted(name for name, option in options.items() if isinstance(option, Tensor)):
        raise ValueError(
            f"ask reads a text alone, and {', '.join(tensors)} would not be read with it: give tensors to generate, "
            "together with the whole prompt."
        )
    check_states_in_cache(model)
    settings = {field.name: options.pop(field.name) for field in fields(CacheOptions) if field.name in options}
    check_names(model, options, "ask", (*inspect.signature(ask).parameters, *(f.name for f in fields(CacheOptions))))
    options = _generation(model, tokenizer, options, max_new_tokens)
    prompts = _Prompts(tokenizer, context + separator, chat_template_kwargs)
    device = _device(model)
    context_ids = torch.tensor([prompts.context_ids], device=device)
    question_ids = [torch.tensor([prompts.question_ids(text)], device=device) for text in texts]
    if policy == AUTO and registered_digest(model.config) is None:
        register_weights(model)
    tokens = budget_of_text(budget, context_ids.shape[1], settings)
    cache = PagedEvictionCache(model.config, tokens, policy=policy, **settings)
    if cache.policy.needs.by_probe:
        raise ValueError(
            f"The policy {cache.policy.label!r} is made for a probe, which ask does not send: use compress_by_probe "
            "and generate, or another policy."
        )
    answers = []
    with aside(model):
        for start in range(0, context_ids.shape[1], chunk_size):
            feed(model, context_ids[:, start : start + chunk_size], None, cache)
        for ids in question_ids:
            answer = _answer(model, torch.cat([context_ids, ids], dim=1), copy.deepcopy(cache), options)
            answers.append(tokenizer.decode(answer, skip_special_tokens=True))
    return answers[0] if isinstance(questions, str) else answers


def _generation(model: Any, tokenizer: Any, options: Mapping[str, Any], max_new_tokens: int | None) -> dict[str, Any]:
    """The arguments of `generate`, with what it needs to find the strings that end an answer, if there are any."""
    settings = generate_settings(model, {**options, "max_new_tokens": max_new_tokens}, "ask")
    settings["max_new_tokens"] = effective(model, settings, "max_new_tokens") or _MAX_NEW_TOKENS
    if effective(model, settings, "stop_strings"):
        settings["tokenizer"] = tokenizer
    return settings


def _answer(model: Any, ids: Tensor, cache: PagedEvictionCache, options: Mapping[str, Any]) -> Tensor:
    """The new tokens `[n]` behind a prompt `[1, length]` whose context the cache has seen."""
    beams = effective(model, options, "num_beams") or 1
    if beams > 1:
        cache.batch_repeat_interleave(beams)
    forget_last_text(model)  # the answer before
    output: Tensor = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **{CACHE_ARGUMENT: cache},
        **options,
    )
    return output[0, ids.shape[1] :]


class _Prompts:
    """A context as token ids, and questions as those that follow it in the whole prompt.

    The tokens next to a question may depend on it; those belong to the question.

    Args:
        context: with the separator.
        template: options of the chat template.
    """

    def __init__(self, tokenizer: Any, context: str, template: Mapping[str, Any] | None) -> None:
        self._tokenizer, self._context, self._template = tokenizer, context, dict(template or {})
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        if self._template and not self._has_template:
            raise ValueError("chat_template_kwargs are given, and this tokenizer has no chat template.")
        texts = [self._text(question) for question in _BEGINNINGS]
        if context.strip() not in commonprefix(texts):  # noqa: RUF071 - no paths
            raise ValueError("The chat template does not put the unchanged context before the question.")
        self.context_ids = list(commonprefix([self._ids(text) for text in texts]))  # noqa: RUF071
        if not self.context_ids:
            raise ValueError(f"The context {context!r:.80} is too short to be read before a question.")

    def question_ids(self, question: str) -> list[int]:
        """What follows the ids of the context."""
        whole, seen = self._ids(self._text(question)), len(self.context_ids)
        if whole[:seen] != self.context_ids or len(whole) == seen:
            raise ValueError(
                f"The prompt of the question {question!r:.80} has another beginning than the other prompts: the "
                "chat template writes something else before it, or its first characters form one token with the "
                "end of the context. In the second case begin it with a letter."
            )
        return whole[seen:]

    def _text(self, question: str) -> str:
        message = self._context + question
        if not self._has_template:
            return message
        chat = [{"role": "user", "content": message}]
        settings = {"add_generation_prompt": True, **self._template}
        try:
            text: str = self._tokenizer.apply_chat_template(chat, tokenize=False, **settings)
        except Exception as error:  # a template is a program: it may fail in any way
            raise ValueError(f"The chat template of the tokenizer fails: {error}") from error
        return text

    def _ids(self, text: str) -> list[int]:
        """Special tokens stand in what a template writes; one that ends a text goes, because an answer follows."""
        ids = list(self._tokenizer(text, add_special_tokens=not self._has_template, verbose=False)["input_ids"])
        while not self._has_template and ids and ids[-1] == self._tokenizer.eos_token_id:
            ids.pop()
        return ids


def _check_pair(model: Any, tokenizer: Any) -> None:
    if not hasattr(model, "generate") or hasattr(model, "decode"):
        other = " The model comes first, then the tokenizer." if hasattr(tokenizer, "generate") else ""
        raise TypeError(f"model must be a model that generates, got {type(model).__name__}.{other}")
    if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
        raise TypeError(
            f"tokenizer must be the model's tokenizer, got {type(tokenizer).__name__}: "
            "AutoTokenizer.from_pretrained(name) loads it."
        )


def _checked(context: Any, questions: Any) -> list[str]:
    """Check both, and return the questions as a list."""
    if not isinstance(questions, str | list | tuple):
        raise TypeError(f"questions must be a text or a list of texts, got {questions!r:.80}.")
    question_list = [questions] if isinstance(questions, str) else list(questions)
    for name, text in [("context", context), *(("each question", question) for question in question_list)]:
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a text, got {text!r:.80}.")
        if not text.strip():
            raise ValueError(f"{name} must be a text that is not empty, got {text!r:.80}.")
    return question_list


def _device(model: Any) -> torch.device:
    """Where the model takes its tokens; of weights that are loaded when they are needed, the CPU."""
    device: torch.device = model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device
