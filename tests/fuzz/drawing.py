"""Cases, drawn: every option of the cache with every other."""

from math import ceil
from random import Random
from typing import Any

from playing import FITTED, MODELS, PLAIN, RECURRENT, SLIDING, Call, Case

OURS = "paged_eviction"
#: These have a rule in lists, so that nothing the cache says is believed.
RULED = ("paged_eviction", "key_norm", "value_norm", "keydiff", "streaming_llm", "recency", "random", "tied")
LISTENING = (
    *("h2o", "snapkv(window=4)", "tova", "attention_mean", "roco", "lazy_eviction(lag=5)", "lru", "lfu", "r_kv"),
    *("sage_kv", "cake", "scissorhands(window=6)", "lra", "lfa", "kvzip", "expected_attention", "caote(h2o)"),
)
OTHERS = ("lagkv(lag=4)", "leverage", "compactor", "hybrid(keydiff, recency)", "graphkv(keydiff)", "vase(keydiff)")
ALLOCATORS = ("heads", "pyramid", "cake", "d2o", "ada_kv")
#: Those whose budgets stay once a prompt has come.
STAYING = ("heads", "pyramid")
BITS = (8, 4, 3, 2, (8, 4), (4, 2))
WEIGHTS = {"llama": 8, "deepseek_v3": 4, "gemma3": 3, "gpt_neox": 2, "small_states": 2, "gemma3n": 1}
WEIGHTS |= {"lfm2": 1, "falcon_h1": 1, "cohere": 1, "glm": 1, "smollm3": 1, "yarn": 1}
assert MODELS.keys() - WEIGHTS.keys() == {"gpt_oss", "qwen3_next"}


def draw(seed: int) -> Case:
    """The case of this seed."""
    random = Random(seed)
    family = random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    options = _sizes(random)
    options |= _what(random, family)
    attention = _attention(random, family, options)
    budget = 16 if isinstance(options["budget"], str) else options["budget"]
    rows = random.choice((1, 2, 2, 3))
    if "protect" in options and "allocator" not in options and random.random() < 0.3:  # each row has its own
        options["protect"] = [[(start + row, end + row) for start, end in options["protect"]] for row in range(rows)]
    return Case(
        options=options,
        calls=_calls(random, family, options, budget if isinstance(budget, int) else max(budget)),
        family=family,
        attention=attention,
        rows=rows,
        seed=seed,
        pass_mask=random.random() < 0.15,
        autocast=random.random() < 0.2 and attention != "eager" and family not in RECURRENT,
    )


def _sizes(random: Random) -> dict[str, Any]:
    """Budget, blocks and protection."""
    block = random.choice((1, 2, 3, 4, 4, 4, 5, 8))
    sizes: dict[str, Any] = {"block_size": block}
    if random.random() < 0.5:
        sizes["sink_tokens"] = random.choice((0, 0, 1, 2, 4, block, block + 1))
    if random.random() < 0.5:
        sizes["recent_tokens"] = random.choice((0, 0, 1, 2, max(block - 1, 0), block, block + 1, 2 * block))
    if random.random() < 0.15:
        sizes["sink_tokens"] = max(sizes.get("sink_tokens", block), random.randint(1, 9))
    protected = sizes.get("sink_tokens", block)
    recent = max(1, ceil(sizes.get("recent_tokens", block) / block))
    smallest = (ceil(protected / block) + recent + 1) * block
    if random.random() < 0.25:
        sizes["protect"] = spans = _spans(random)
        smallest += sum((end - start + block - 2) // block + 2 for start, end in spans) * block
    budget = smallest + block * random.choice((0, 0, 1, 1, 2, 3))
    kind = random.random()
    if kind < 0.06:
        sizes.pop("protect", None)  # mostly too small for its prompt
        return {**sizes, "budget": random.choice(("30%", "50%", "80%"))}
    if kind < 0.10:
        return {**sizes, "budget": random.choice(("6000B", "12000B", "40000B"))}
    if kind < 0.22:
        budget = ceil(80 / block) * block
    return {**sizes, "budget": budget}


def _spans(random: Random) -> list[tuple[int, int]]:
    starts = [random.randint(0, 40) for _ in range(random.choice((0, 1, 1, 2)))]
    return [(start, start + random.randint(1, 6)) for start in starts]


def _what(random: Random, family: str) -> dict[str, Any]:
    """Everything else."""
    chances: dict[str, tuple[float, tuple[Any, ...]]] = {
        "heads": (0.45, ("separate",)),
        "positions": (0.35, ("cache",)),
        "bits": (0.45, BITS),
        "static": (0.25, (True,)),
        "record_past": (0.2, (True,)),
        "allocator": (0.2, ALLOCATORS),
    }
    options = {name: random.choice(values) for name, (chance, values) in chances.items() if random.random() < chance}
    kind = random.random()
    policies = RULED if kind < 0.65 else LISTENING if kind < 0.9 else OTHERS
    options["policy"] = random.choice(policies)
    if random.random() < 0.1:
        options["policy"] = random.choice(FITTED)
    if options["policy"] in FITTED and family not in (*PLAIN, *SLIDING):
        options["policy"] = "expected_attention"
    if family == "deepseek_v3" and options["policy"] in ("paged_eviction", "key_norm", "value_norm"):
        options["policy"] = random.choice(("keydiff", "random", "recency"))
    # What is refused shows little: mostly leave one of two out that do not go together.
    if random.random() < 0.95:
        if family in SLIDING:
            options.pop("static", None)
        if "static" in options:
            options.pop("record_past", None)
            if options.get("allocator") not in STAYING:
                options.pop("allocator", None)
        if options.get("allocator") in ("ada_kv", "heads"):
            options["heads"] = "separate"
        if family == "deepseek_v3" and options.get("allocator") == "heads":
            options["allocator"] = "pyramid"
        if family == "deepseek_v3" or "bits" in options:
            options.pop("positions", None)
    return options


def _attention(random: Random, family: str, options: dict[str, Any]) -> str:
    listening = options["policy"] in (*LISTENING, *FITTED) or "allocator" in options
    if listening or random.random() < 0.3:
        return OURS
    plain = family in ("llama", "gpt_neox") and "bits" not in options and random.random() < 0.2
    return "eager" if plain else "sdpa"


def _calls(random: Random, family: str, options: dict[str, Any], budget: int) -> tuple[Call, ...]:
    """A prompt, and what comes after it; few enough columns for a slow game."""
    pads = ("none", "left", "any") if family not in RECURRENT else ("none", "left")

    def several(most: int) -> Call:
        return "feed", random.randint(2, most), random.choice(pads)

    def prompt() -> Call:
        longest = random.choice((1, 3, min(budget, 20), min(2 * budget, 30)))
        return "feed", random.randint(1, longest), random.choice(pads)

    makers = {
        "steps": lambda: ("steps", random.randint(1, 9), random.choice(("none", "none", "none", "any"))),
        "feed": lambda: several(9),
        "crop": lambda: ("crop", random.randint(0, 5)),
        "order": lambda: ("order", random.choice(("reorder", "select", "repeat"))),
        "save": lambda: ("save",),
        "copy": lambda: (random.choice(("copy", "pickle")),),
        "shrink": lambda: ("shrink", random.randint(1, 2)),
        "fail": lambda: (
            "fail",
            random.choice((1, 1, 3)),
            random.choice(("before", "between")),
            random.choice((0, 1, 4)),
        ),
        "anew": lambda: (random.choice(("reset", "release")),),
        "gradient": lambda: ("gradient", random.randint(1, 4)),
        "alone": lambda: ("alone",),
        "unmasked": lambda: ("unmasked",),
        "protect": lambda: ("protect", _spans(random)),
        "forget": lambda: ("forget", _spans(random), random.random() < 0.4),
        "hide": lambda: (
            "hide",
            random.choice(("end", "end", "any", "row")),
            random.choice((1, 1, 2, 5)),
            random.random() < 0.3,
        ),
    }
    weights = {"steps": 9, "feed": 4, "crop": 3, "order": 3, "save": 2, "copy": 2, "shrink": 1, "fail": 1}
    weights |= {"anew": 1, "gradient": 1, "alone": 1, "protect": 2, "hide": 4, "forget": 3, "unmasked": 2}
    if options.get("record_past"):
        weights["crop"] = 8
    names = random.choices(list(weights), list(weights.values()), k=random.randint(2, 6))
    calls: list[Call] = [prompt()]
    if "bits" in options and random.random() < 0.3:  # the first block comes in single tokens
        calls = [("feed", 1, random.choice(pads)), ("steps", random.randint(1, 9), random.choice(pads))]
    for name in names:
        calls.append(makers[name]())
        if name in ("anew", "gradient", "fail"):
            calls.append(prompt())
    return (*calls, ("steps", random.randint(2, 8), "none"))
