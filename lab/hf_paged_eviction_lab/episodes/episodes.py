"""A long conversation as several compressed caches, one for each of its topics (EpiCache, arXiv 2509.17396)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache, make_policy
from hf_paged_eviction.internals import check_probed, first_tokens, whole_number

from .clusters import cluster, unit
from .embedding import Embed, HiddenStates
from .reading import read_compressed
from .segments import Ids, as_ids, segment
from .sensitivity import budgets_by_sensitivity

#: What this recipe decides itself, or cannot serve.
_REFUSED = {
    "allocator": "give layers=, a measured sensitivity per layer",
    "static": "what is compiled cannot shrink",
    "record_past": "it is on while the probe is fed; switch it on for a cache that was opened",
    "attention_mask": "a conversation has no pads",
}


@dataclass(frozen=True)
class Episode:
    """A topic of the conversation.

    Attributes:
        segments: indices of those that belong to it, in the order of the text.
        shares: tokens that each paged layer holds.
    """

    segments: tuple[int, ...]
    shares: tuple[int, ...]


class Episodes:
    """The caches of a conversation, by topic. Made by `read_episodes`.

    Attributes:
        episodes: one for each cache, numbered by where they begin.
        centroids: `[episodes, dim]` float32 of length 1.
    """

    def __init__(
        self,
        episodes: Sequence[Episode],
        centroids: Tensor,
        embed: Embed,
        caches: Sequence[PagedEvictionCache],
    ) -> None:
        self.episodes, self.centroids = tuple(episodes), centroids
        self._embed, self._caches = embed, list(caches)

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def budget(self) -> int:
        """Tokens held per layer, on average over layers, in all episodes together."""
        return sum(sum(episode.shares) // max(len(episode.shares), 1) for episode in self.episodes)

    def nearest(self, question: Ids) -> int:
        """The episode that a question is about. The first one, if it is like none.

        Args:
            question: ids `[n]`, at least one.

        Raises:
            TypeError, ValueError: these are no ids.
        """
        ids = as_ids("question", question)
        if not len(ids):
            raise ValueError("The question has no token, so it belongs to no episode.")
        return int((self.centroids @ unit(_vectors(self._embed, [ids]))[0]).argmax())

    def open(self, episode: int) -> PagedEvictionCache:
        """A cache of that episode, to go on from; what is kept here stays as it is.

        >>> cache = episodes.open(episodes.nearest(ids))  # doctest: +SKIP
        >>> model.generate(**cache.follow_up(ids[None]), cache=cache)  # doctest: +SKIP

        Raises:
            ValueError: there is no such episode.
        """
        if isinstance(episode, bool) or not isinstance(episode, int) or not 0 <= episode < len(self):
            raise ValueError(f"episode must be from 0 to {len(self) - 1}, got {episode!r}.")
        cache = copy.deepcopy(self._caches[episode])
        for layer in cache.layers:
            layer.prefetch()
        return cache


def read_episodes(
    model: Any,
    turns: Sequence[Ids],
    budget: int,
    *,
    system: Ids = (),
    episodes: int = 4,
    turns_per_segment: int = 4,
    probe_segments: int = 8,
    embed: Embed | None = None,
    layers: Tensor | Sequence[float] | None = None,
    chunk_size: int = 512,
    seed: int = 0,
    **settings: Any,
) -> Episodes:
    """Read a conversation into a compressed cache for each of its topics (EpiCache, arXiv 2509.17396).

    The conversation is cut into segments of a few turns, which are embedded and grouped by k-means. For each group,
    an episode, the whole conversation is read in blocks into a cache of its own; after each block the segments nearest
    to the group's centroid are fed as a probe, what they attend to most is kept, and the probe is taken back. So an
    episode's cache knows the whole conversation, but its own topic best. A question goes to the nearest episode.

    All episodes together hold at most `budget` tokens per layer. One of them is in use at a time; the others lie in
    host memory. Each is a cache, and can be saved as such: `episodes.open(n).save(file)`.

    Differences from the paper: `budget` is that of all episodes together (there each has it); `system` is never evicted
    (there it may be); centroids have length 1, so that compact groups win no questions; there are as many episodes as
    segments where there are fewer segments; layers given more by `layers=` take it from the others, so that the sum is
    kept; the softmax of the probe's queries is over the probe, too; the policy decides, "kvzip" with separate heads by
    default, which is the largest weight that a query pays.

    Cost: the conversation is read once for every episode, and the probe after each block of it. While one is read it
    holds `chunk_size` tokens more than in the end. Attention has to be shown:
    `model.set_attn_implementation("paged_eviction")`.

    Args:
        model: a decoder, in evaluation mode.
        turns: of the conversation, ids `[n]` each, as the model is to read them (with what a chat template puts around
            them). Empty ones are left out.
        budget: tokens per layer, in all episodes together.
        system: ids before the first turn, such as a system prompt; never evicted.
        episodes: at most so many.
        turns_per_segment: turns that are embedded together.
        probe_segments: how many segments of an episode, those nearest to its centroid, are its probe.
        embed: makes vectors of texts; `HiddenStates(model)` if None. Small models tell topics apart badly: measure, or
            take `RareTokens` or a model made for it.
        layers: what `layer_sensitivity` measured; None = all layers hold the same.
        chunk_size: tokens of a block, a multiple of `block_size`.
        seed: of the grouping.
        **settings: further arguments of `PagedEvictionCache`, such as `block_size`, `bits` or `policy`.

    Raises:
        TypeError, ValueError: turns, sizes or settings that cannot be meant; a budget too small for so many episodes;
            vectors that are not numbers, or one per text. Nothing was read then, except by `embed`.
    """
    for name, value in (("episodes", episodes), ("probe_segments", probe_segments), ("chunk_size", chunk_size)):
        whole_number(name, value, 1)
    segments = segment(turns, whole_number("turns_per_segment", turns_per_segment, 1))
    start = as_ids("system", system)
    arguments = _settings(settings, len(start))
    smallest, paged = _check_cache(model, arguments, chunk_size)

    size = int(arguments["block_size"])
    if layers is not None and len(layers) != paged:
        raise ValueError(f"layers= has {len(layers)} numbers, and the model {paged} paged layers.")

    def shares_of(count: int) -> list[list[int]]:
        parts = _parts(whole_number("budget", budget, 1), count, smallest, size)
        if layers is None:
            return [[part] * paged for part in parts]
        return [budgets_by_sensitivity(layers, part, block_size=size, least=smallest) for part in parts]

    shares_of(min(episodes, len(segments)))  # is there enough? Asked before anything is read
    embed = HiddenStates(model) if embed is None else embed
    vectors = unit(_vectors(embed, segments))
    groups = cluster(vectors, episodes, seed)
    device = model.get_input_embeddings().weight.device
    text = torch.cat([start, *segments])[None].to(device)
    contents, caches = [], []
    for number, share in enumerate(shares_of(len(groups.centroids))):
        members = (groups.labels == number).nonzero()[:, 0]
        # Its probe: those nearest to the centroid, in the order of the text.
        order = (vectors[members] @ groups.centroids[number]).sort(descending=True, stable=True).indices
        nearest = members[order[:probe_segments]].sort().values.tolist()
        probe = torch.cat([segments[at] for at in nearest])[None].to(device)
        cache = read_compressed(model, text, probe, share, chunk_size, arguments)
        for layer in cache.layers:
            layer.offload()
        contents.append(Episode(tuple(members.tolist()), tuple(share)))
        caches.append(cache)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # copies to the host do not wait
    return Episodes(contents, groups.centroids, embed, caches)


def _vectors(embed: Embed, texts: Sequence[Tensor]) -> Tensor:
    vectors = embed(texts)
    if not isinstance(vectors, Tensor) or vectors.ndim != 2 or len(vectors) != len(texts):
        got = list(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
        raise ValueError(f"embed= must give a tensor [{len(texts)}, dim] for {len(texts)} texts, got {got}.")
    vectors = vectors.detach().float().cpu()
    if not vectors.isfinite().all():
        raise ValueError("embed= gave numbers that are infinite or nan.")
    return vectors


def _settings(options: dict[str, Any], system: int) -> dict[str, Any]:
    refused = [name for name in options if name in _REFUSED]
    if refused:
        raise TypeError(f"read_episodes takes no {refused[0]}=: {_REFUSED[refused[0]]}.")
    policy = make_policy(options.get("policy", "kvzip"), options.get("profile"))
    check_probed(policy)
    settings = {"heads": "separate", "block_size": 16, **options, "policy": policy}
    sinks = first_tokens(settings.get("sink_tokens"), policy, settings["block_size"])
    return {**settings, "sink_tokens": max(sinks, system)}


def _check_cache(model: Any, settings: dict[str, Any], chunk_size: int) -> tuple[int, int]:
    """The smallest legal budget and the number of paged layers, of a cache with these settings.

    Raises:
        TypeError, ValueError: there is no such cache, or the chunk does not fit its blocks.
    """
    size = whole_number("block_size", settings["block_size"], 1)
    if chunk_size % size:
        raise ValueError(f"chunk_size={chunk_size} is not a multiple of block_size={size}.")
    protected = sum(settings.get(name) or 0 for name in ("sink_tokens", "recent_tokens"))
    cache = PagedEvictionCache(model.config, (protected // size + 8) * size, **settings)
    if not cache.paged_layers:
        raise ValueError("No layer of this model keeps all that it has read, so there is nothing to compress.")
    return cache.paged_layers[0][1].budget.smallest, len(cache.paged_layers)


def _parts(budget: int, episodes: int, smallest: int, block_size: int) -> list[int]:
    """Tokens per layer of each episode, in whole blocks.

    Raises:
        ValueError: it is not enough for so many.
    """
    blocks = budget // block_size
    parts = [(blocks // episodes + (at < blocks % episodes)) * block_size for at in range(episodes)]
    if parts[-1] < smallest:
        raise ValueError(
            f"budget={budget} for {episodes} episodes leaves {parts[-1]} tokens for one, and the system prompt, the "
            f"newest tokens and a block to evict take {smallest}. Use budget={smallest * episodes} or more, or fewer "
            "episodes."
        )
    return parts
