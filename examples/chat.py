"""A conversation in a cache of fixed size. Above every answer it draws the blocks that are held.

python examples/chat.py                              # the package's model reads facts and is asked for them later
python examples/chat.py --model Qwen/Qwen3-0.6B --budget 1024 --policy auto --profile FILE < one_message_per_line.txt
The message /again answers the last one anew, by sampling, from a copy of the cache from before its answer.
"""

import argparse
import copy
import sys

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import generate_settings
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples

BARS = " ▁▂▃▄▅▆▇█"
COLOURS = ("red", "yellow", "cyan", "green")
#: Stands for an answer, to find out what a chat template writes behind one.
MARK = "qzx3answer7xzq"


def strip(cache: PagedEvictionCache, layer: int, width: int) -> Text:
    """The conversation from left to right: the height is the share of tokens that are held, the colour their score."""
    positions, scores = cache.block_table(layer)[0].cpu(), cache.block_scores(layer)[0].cpu()  # [heads, blocks(, size)]
    width = min(width, seen := cache.get_seq_length())
    # The rank of a block among those of its head, 0 to 1; blocks that are never evicted now have no score.
    ranks = scores.nan_to_num(float("inf")).argsort(-1).argsort(-1) / scores.shape[1]
    ranks = ranks[..., None].expand_as(positions)[positions >= 0].double()
    columns = positions[positions >= 0] * width // seen
    held = torch.bincount(columns, minlength=width)
    rank = torch.zeros(width, dtype=torch.float64).index_add_(0, columns, ranks) / held.clamp(min=1)
    tokens = torch.bincount(torch.arange(seen) * width // seen, minlength=width) * positions.shape[0]
    text = Text(f"layer {layer:<3} ")
    for share, place in zip((held / tokens).tolist(), rank.tolist(), strict=True):
        bar = BARS[min(len(BARS) - 1, max(round(share * (len(BARS) - 1)), int(share > 0)))]
        text.append(bar, COLOURS[min(len(COLOURS) - 1, int(place * len(COLOURS)))])
    return text


def picture(cache: PagedEvictionCache, console: Console) -> Text:
    """The first, a middle and the last layer that evict, and what they hold."""
    paged = [index for index, _ in cache.paged_layers]
    shown = dict.fromkeys([paged[0], paged[len(paged) // 2], paged[-1]])
    lines, stats = [strip(cache, index, console.width - 12) for index in shown], cache.stats()
    lost, memory = stats.evicted_tokens / len(paged), f"{stats.device_bytes / 2**20:.1f} MiB"
    told = f"{stats.seen:,} tokens seen; a layer: {stats.mean_held:,.0f} held, {lost:,.0f} evicted; {memory}"
    return Text("\n").join([*lines, Text(told, "dim")])


class Drawn(TextStreamer):
    """Draws the blocks while an answer comes."""

    def __init__(self, tokenizer, live: Live, cache: PagedEvictionCache) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.live, self.cache, self.text = live, cache, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self.live.update(picture(self.cache, self.live.console) + Text(f"\n{self.text}"), refresh=True)


class Conversation:
    """Every token is read once: a turn feeds what is new behind the tokens that the cache has seen."""

    def __init__(self, model, tokenizer, typed: argparse.Namespace) -> None:
        self.model, self.tokenizer, self.console = model, tokenizer, Console(highlight=False)
        self.cache = PagedEvictionCache(model.config, typed.budget, policy=typed.policy, profile=typed.profile)
        self.ids: list[int] = []

    def new_ids(self, message: str) -> list[int]:
        """Tokens of a message behind an answer that has ended."""
        if not self.tokenizer.chat_template:
            text = f"\n{message}" if self.ids else message
            return self.tokenizer(text, add_special_tokens=not self.ids)["input_ids"]
        turns = [{"role": "user", "content": message}]
        if self.ids:
            turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}, *turns]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text.rpartition(MARK)[2], add_special_tokens=False)["input_ids"]

    def answer(self, message: str, max_new_tokens: int, do_sample: bool = False) -> str:
        """Read a message and answer it, greedily by default; draws on a terminal, and in the end everywhere."""
        self.before = copy.deepcopy(self.cache), [*self.ids], message  # as small as the cache; crop leaves traces
        self.ids += self.new_ids(message)
        row = torch.tensor([self.ids], device=self.model.device)
        live = Live(console=self.console, auto_refresh=False, transient=True)
        drawn = Drawn(self.tokenizer, live, self.cache)
        settings = {"max_new_tokens": max_new_tokens, "do_sample": do_sample, "num_beams": 1}
        with live:
            output = self.model.generate(
                row,
                attention_mask=torch.ones_like(row),
                cache=self.cache,
                **generate_settings(self.model, settings, "chat.py"),
                streamer=drawn if self.console.is_terminal else None,
                pad_token_id=self.tokenizer.eos_token_id,
            )
        new_ids = output[0, len(self.ids) :].tolist()
        # The next turn begins with the token that ends an answer. An answer that was cut has none.
        ends = self.model.generation_config.eos_token_id
        self.ids += new_ids[:-1] if new_ids[-1] in (ends if isinstance(ends, list) else [ends]) else new_ids
        text = self.tokenizer.decode(new_ids, skip_special_tokens=True).strip()
        self.console.print(picture(self.cache, self.console))
        self.console.print(Text(text, "bold"))
        return text


def demonstration(conversation: Conversation) -> None:
    """Facts and a question about them, four times; then the questions again, when most of the facts are long ago."""
    samples = make_samples("kv_recall", conversation.tokenizer, length=300, count=4, seed=1)
    turns = [*((each.prompt, each) for each in samples), *((each.question.strip(), each) for each in samples)]
    right = 0
    for message, sample in turns:
        conversation.console.print(Text(f"\nyou> ...{message[-100:]}"))
        good = conversation.answer(message, 4).startswith(sample.answers)
        right += good
        conversation.console.print(Text("right" if good else f"forgotten: {sample.answers[0]}", "dim"))
    conversation.console.print(f"\n{right} of {len(turns)} right with {conversation.cache.policy.label}")


def main() -> None:
    """Talk until the messages end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name on the Hub or a folder; without it, the model of the package talks")
    parser.add_argument("--budget", type=int, default=256, help="tokens per layer (default 256)")
    parser.add_argument("--policy", default="keydiff", help="what decides which are evicted (default keydiff)")
    parser.add_argument("--profile", help="file of paged-eviction prepare, for a policy that reads one")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    typed = parser.parse_args()
    if typed.model is None:
        demonstration(Conversation(*embedded.load(attn_implementation="paged_eviction"), typed))
        return
    model = AutoModelForCausalLM.from_pretrained(typed.model, attn_implementation="paged_eviction", dtype="auto").eval()
    conversation = Conversation(model, AutoTokenizer.from_pretrained(typed.model), typed)
    for message in filter(str.strip, sys.stdin):  # Ctrl-D ends it
        again = message.strip() == "/again" and bool(conversation.ids)
        if again:
            conversation.cache, conversation.ids, message = conversation.before
        conversation.answer(message.strip(), typed.max_new_tokens, again)


if __name__ == "__main__":
    main()
