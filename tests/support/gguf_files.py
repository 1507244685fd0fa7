"""A Llama of two layers with random weights, and a tokenizer of single bytes, as one GGUF file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, INNER, HEADS, KV_HEADS, LAYERS, WINDOW = 32, 64, 4, 2, 2, 512
TEMPLATE = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"


def write_gguf(
    path: Path, *, begins: bool | None = None, merges: Sequence[str] = ("a b", "b c", "\u0120 a"), kind: str = "F32"
) -> None:
    """Write the file; numbers are the same each time.

    Args:
        kind: of the numbers in matrices, such as "BF16" or "Q4_0".
        begins: whether texts begin with a token of their own; None = the file does not say.
        merges: the vocabulary has "ab", "bc" and " a", whatever they say.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType
    from gguf.quants import quantize
    from tokenizers.pre_tokenizers import ByteLevel

    words = ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), "ab", "bc", "\u0120a"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(WINDOW)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(words) - 3))
    writer.add_token_merges([*merges])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if begins is not None:
        writer.add_add_bos_token(begins)
    writer.add_chat_template(TEMPLATE)
    for name, shape in _shapes(len(words)).items():
        stored = GGMLQuantizationType[kind if len(shape) > 1 else "F32"]
        writer.add_tensor(name, quantize(_numbers(name, shape), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(words: int) -> dict[str, tuple[int, ...]]:
    narrow = WIDTH * KV_HEADS // HEADS
    layer = {
        "attn_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (narrow, WIDTH),
        "attn_v": (narrow, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (words, WIDTH), "output_norm.weight": (WIDTH,)}
    return shapes | {f"blk.{at}.{name}.weight": shape for at in range(LAYERS) for name, shape in layer.items()}


def _numbers(name: str, shape: tuple[int, ...]) -> Any:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return np.random.default_rng(len(name)).normal(scale=0.2, size=shape).astype(np.float32)
