"""The embedded tokenizer: byte-level BPE whose training text makes every task word a single token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_paged_eviction_eval.tasks import haystack
from hf_paged_eviction_eval.tasks.words import CLASSES, POOL

VOCABULARY = 3072
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"

# GPT-2's pattern, but each digit stands alone: a number is then found digit by digit, never as a rare piece.
_PATTERN = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A system message is the context and ends its own line; a user message is the question; an answer ends with EOS.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}"
    "{% elif message['role'] == 'system' and not message['content'].endswith('\\n') %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
)

_REPEATS = 4000  # often enough that a task word outweighs the pieces of real text and is merged whole


def task_words() -> list[str]:
    """Every word that a task or the filler grammar uses in the middle of a line."""
    words = [*POOL, *CLASSES, *(word for members in CLASSES.values() for word in members), *haystack.vocabulary()]
    return sorted({*words, *"passkey vault opens Register register Span span Example let code number named".split()})


def _training_text(texts: Iterable[str]) -> Iterator[str]:
    yield from texts
    for word in task_words():
        yield f" {word}" * _REPEATS


def train(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer trained on `texts` and the task words."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_training_text(texts), trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return wrap(core)


def wrap(core: Tokenizer) -> PreTrainedTokenizerFast:
    """The Hugging Face view of a trained tokenizer."""
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=4096,
        model_input_names=["input_ids", "attention_mask"],  # version 4 adds token types, which Llama refuses
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
