"""Query-aware policies as plain loops over one row and KV head. Each takes the queries that were observed."""

import math
from collections.abc import Callable
from itertools import pairwise

import torch

from policy_inputs import BUDGET, Head, Vector, turned
from reference import mixed

#: head, first query observed -> a score per token
Slow = Callable[[Head, int], Vector]


def mean(numbers: Vector) -> float:
    return sum(numbers) / len(numbers)


def norm(vector: Vector) -> float:
    return math.sqrt(sum(x * x for x in vector))


def cosine(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / (norm(a) * norm(b))


def paid(head: Head, token: int, first: int = 0) -> Vector:
    """Attention to one token by each later query, mean of the query heads."""
    return [mean([w[q][token] for w in head.weights]) for q in range(max(first, token), head.length)]


def h2o(head: Head, first: int) -> Vector:
    """The newest half of the budget is safe."""
    recent = head.length - BUDGET // 2
    return [math.inf if t >= recent else sum(paid(head, t)) for t in range(head.length)]


def h2o_mean(head: Head, first: int) -> Vector:
    """A quarter of the budget is recent."""
    recent = head.length - BUDGET // 4
    return [math.inf if t >= recent else score for t, score in enumerate(attention_mean(head, first))]


def attention_mean(head: Head, first: int) -> Vector:
    return [mean(paid(head, t)) for t in range(head.length)]


def kvzip(head: Head, first: int) -> Vector:
    return [max(w[q][t] for w in head.weights for q in range(head.length)) for t in range(head.length)]


def sage_kv(head: Head, first: int) -> Vector:
    return [mean([w[-1][t] for w in head.weights]) for t in range(head.length)]


def sage_kv_once(head: Head, first: int) -> Vector:
    """Window 4: at the end of the prompt."""
    return [math.inf if t >= head.length - 4 else score for t, score in enumerate(sage_kv(head, first))]


def tova(head: Head, first: int) -> Vector:
    return [mean([w[-1][t] for one in head.siblings for w in one.weights]) for t in range(head.length)]


def _window(head: Head, first: int, over_group: Callable[[Vector], float]) -> Vector:
    scores = []
    for t in range(head.length):
        later = range(max(first, t), head.length)
        scores.append(mean([over_group([w[q][t] for w in head.weights]) for q in later]))
    return scores


def _pool(scores: Vector, before: int, kernel: int, reduce: Callable[[Vector], float]) -> Vector:
    half = kernel // 2
    padded = [0.0] * half + scores[:before] + [0.0] * half
    return [reduce(padded[t : t + kernel]) for t in range(before)] + scores[before:]


def _pinned(scores: Vector, first: int) -> Vector:
    return [math.inf if t >= first else score for t, score in enumerate(scores)]


def snapkv(head: Head, first: int) -> Vector:
    """Window 6, kernel 3, average."""
    return _pinned(_pool(_window(head, first, mean), first, 3, mean), first)


def snapkv_max(head: Head, first: int) -> Vector:
    """Window 6, kernel 5, maximum."""
    return _pinned(_pool(_window(head, first, mean), first, 5, max), first)


def cake(head: Head, first: int) -> Vector:
    """Window 6, kernel 3, gamma 5; the variance over all queries of all heads of the group."""
    scores = []
    for t in range(head.length):
        pays = [w[q][t] for w in head.weights for q in range(first, head.length)]
        variance = mean([(pay - mean(pays)) ** 2 for pay in pays]) * 6 / 5
        scores.append(mean(pays) + 5 * variance)
    return _pinned(_pool(scores, first, 3, mean), first)


def redundancy(head: Head) -> Vector:
    similar = [[cosine(a, b) for b in head.keys] for a in head.keys]
    for i, row in enumerate(similar):
        row[i] = 0.0
        near = [j for j, value in enumerate(row) if value > 0.5]
        if near:
            row[near[-1]] = 0.0
    return [mean([row[t] for row in similar]) for t in range(head.length)]


def r_kv(head: Head, first: int) -> Vector:
    """Window 8, kernel 7."""
    rows = []
    for q in range(first, head.length):
        largest = [
            max(0.4 * sum(a * b for a, b in zip(one[q], key, strict=True)) for one in head.queries)
            for key in head.keys[:first]
        ]
        rows.append([math.exp(x) / sum(map(math.exp, largest)) for x in largest])
    attention = [mean([row[t] for row in rows]) for t in range(first)] + [0.0] * (head.length - first)
    attention = _pool(attention, first, 7, max)
    logits = redundancy(head)
    softmax = [math.exp(x) / sum(map(math.exp, logits)) for x in logits]
    return _pinned([0.1 * a - 0.9 * r for a, r in zip(attention, softmax, strict=True)], first)


def roco(head: Head, first: int) -> Vector:
    means = attention_mean(head, first)
    stds = []
    for t in range(head.length):
        numbers = paid(head, t)
        stds.append(math.sqrt(max(mean([x * x for x in numbers]) - mean(numbers) ** 2, 0.0)))
    order = sorted(range(head.length), key=lambda t: (stds[t], t), reverse=True)
    safe = set(order[: math.floor(0.3 * head.length)])
    highest = max(means[t] for t in range(head.length) if t not in safe)
    return [means[t] + (highest if t in safe else 0.0) for t in range(head.length)]


Hit = Callable[[Vector, int], list[bool]]  # the weights a query sees, and which tokens it uses


def _used(head: Head, token: int, first: int, hit: Hit) -> list[bool]:
    """For each query from `first` on that sees the token, whether some query head uses it."""
    return [any(hit(w[q][: q + 1], q)[token] for w in head.weights) for q in range(max(first, token), head.length)]


def _last(head: Head, first: int, hit: Hit) -> Vector:
    scores = []
    for t in range(head.length):
        used = [q for q, yes in enumerate(_used(head, t, first, hit), max(first, t)) if yes]
        scores.append((used[-1] + 1 if used else 0) - head.length)
    return scores


def _rate(head: Head, hit: Hit) -> Vector:
    return [mean([float(yes) for yes in _used(head, t, 0, hit)]) for t in range(head.length)]


def _top(seen: Vector, query: int) -> list[bool]:
    return [sum(other > weight for other in seen) < 3 for weight in seen]


def _more_than_even(seen: Vector, query: int) -> list[bool]:
    return [weight > 1 / len(seen) for weight in seen]


def _above_70(seen: Vector, query: int) -> list[bool]:
    bound = sorted(seen, reverse=True)[len(seen) * 30 // 100]
    return [weight > bound for weight in seen]


def lru(head: Head, first: int) -> Vector:
    """Top 3."""
    return _last(head, first, _top)


def lfu(head: Head, first: int) -> Vector:
    """Top 3."""
    return _rate(head, _top)


def lra(head: Head, first: int) -> Vector:
    return _last(head, first, _more_than_even)


def lfa(head: Head, first: int) -> Vector:
    return _rate(head, _more_than_even)


def scissorhands(head: Head, first: int) -> Vector:
    """Window 9, percentile 70."""
    return _last(head, first, _above_70)


def lazy_eviction(head: Head, first: int) -> Vector:
    """Threshold 0.15, lag 3."""

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    scores = []
    for t in range(head.length):
        active = [q for q in range(t, head.length) if max(w[q][t] for w in head.weights) > 0.15]
        pause = max((b - a for a, b in pairwise(active)), default=0)
        age = head.length - 1 - active[-1] if active else 0
        if t >= head.length - 3:
            scores.append(math.inf)
        elif not active:
            scores.append(0.0)
        elif not pause:
            scores.append(float(age == 0))
        else:
            scores.append(2 * sigmoid(-age / pause) + 2 * sigmoid(-pause - 1))
    return scores


def _expected(head: Head, weigh: Callable[[int], float], covariance: bool = True) -> Vector:
    """Scaling 0.4, the next 7 positions, the first 4 tokens left out; `weigh` says how much a query counts by age."""
    ahead = range(head.length, head.length + 7)
    shares: list[Vector] = []
    for queries in head.unrotated_queries:
        rows = [[0.4 * x for x in query] for query in queries[4:]]
        # The mean rotation is linear, so it may as well be taken of each query, all of which turn by the same angles.
        rows = [[mean(list(x)) for x in zip(*(turned(row, at) for at in ahead), strict=True)] for row in rows]
        weights = [weigh(len(rows) - 1 - i) for i in range(len(rows))]
        average = [sum(w * row[d] for w, row in zip(weights, rows, strict=True)) / sum(weights) for d in range(6)]
        logits = []
        for key in head.keys[4:]:
            centre = sum(m * k for m, k in zip(average, key, strict=True))
            spread = [sum((x - m) * k for x, m, k in zip(row, average, key, strict=True)) for row in rows]
            variance = sum(w * s * s for w, s in zip(weights, spread, strict=True)) / sum(weights)
            logits.append(centre + variance / 2 * covariance)
        total = sum(math.exp(x - max(logits)) for x in logits)
        shares.append([math.inf] * 4 + [math.exp(x - max(logits)) / total for x in logits])
    return [mean([share[t] for share in shares]) for t in range(head.length)]


def expected_attention(head: Head, first: int) -> Vector:
    return [a * norm(v) for a, v in zip(_expected(head, lambda age: 1.0), head.values, strict=True)]


def expected_attention_fading(head: Head, first: int) -> Vector:
    """Horizon 5, epsilon 0.1."""
    attentions = _expected(head, lambda age: math.exp(-age / 5))
    return [(a + 0.1) * norm(v) for a, v in zip(attentions, head.values, strict=True)]


def expected_attention_mean(head: Head, first: int) -> Vector:
    """Neither covariance nor the norm of values."""
    return _expected(head, lambda age: 1.0, covariance=False)


def _lag_deviations(states: list[Vector], sinks: int) -> list[Vector]:
    """Lag 4: for each part after the sinks that has a full one behind it, the deviation of its tokens."""
    parts = [states[at : at + 4] for at in range(sinks, len(states) - 3, 4)]
    deviations = []
    for part, following in pairwise(parts):
        channels = list(zip(*following, strict=True))
        scaled = [[(x - min(c)) / (max(c) - min(c)) for x, c in zip(s, channels, strict=True)] for s in part]
        deviations.append([math.sqrt(sum((x - mean(s)) ** 2 for x in s) / (len(s) - 1)) for s in scaled])
    return deviations


def lagkv_all(head: Head, first: int) -> Vector:
    """Lag 4, no sinks, across parts."""
    both = zip(_lag_deviations(head.keys, 0), _lag_deviations(head.values, 0), strict=True)
    scores = [a + b for keys, values in both for a, b in zip(keys, values, strict=True)]
    return scores + [math.inf] * (head.length - len(scores))


def lagkv(head: Head, first: int) -> Vector:
    """Lag 4, two sinks, value weight 0.5."""

    def softmax(numbers: Vector) -> Vector:
        return [math.exp(x) / sum(map(math.exp, numbers)) for x in numbers]

    scores = [math.inf, math.inf]
    for keys, values in zip(_lag_deviations(head.keys, 2), _lag_deviations(head.values, 2), strict=True):
        shares = [a + 0.5 * b for a, b in zip(softmax(keys), softmax(values), strict=True)]
        scores += [sum(other < share for other in shares) / 4 for share in shares]
    return scores + [1.0] * (head.length - len(scores))


def _leverage(rows: list[Vector], ridge: float) -> Vector:
    """As the reach of the regression that explains one row by all."""
    matrix = torch.tensor(rows, dtype=torch.float64)
    gram = matrix.T @ matrix
    inverse = torch.linalg.inv(gram + ridge * gram.trace() / len(gram) * torch.eye(len(gram), dtype=torch.float64))
    return [float(row @ inverse @ row) for row in matrix]


def leverage(head: Head, first: int) -> Vector:
    """Ridge 0.01."""
    return _leverage(head.unrotated_keys, 0.01)


def compactor(head: Head, first: int, blending: float = 0.7) -> Vector:
    """Chunks of 5 after one sink, the newest two stay."""
    rivals = range(1, head.length - 2)

    def geometry(one: Head) -> Vector:
        keys = [one.unrotated_keys[t] for t in rivals]
        centre = [mean(list(channel)) for channel in zip(*keys, strict=True)]
        return _leverage([[x - m for x, m in zip(key, centre, strict=True)] for key in keys], 1e-4)

    def attention(one: Head) -> Vector:
        paid = [0.0] * one.length
        for queries in one.queries:
            for q in range(1, one.length):
                chunk = [t for t in range(1, one.length) if (t - 1) // 5 == (q - 1) // 5]
                logits = [sum(a * b for a, b in zip(queries[q], one.keys[t], strict=True)) for t in chunk]
                total = sum(math.exp(x - max(logits)) for x in logits)
                for t, logit in zip(chunk, logits, strict=True):
                    paid[t] += math.exp(logit - max(logits)) / total / len(one.queries)
        worth = [0.0, *(paid[t] * norm(one.values[t]) for t in rivals), 0.0]
        return [mean(worth[t - 1 : t + 2]) for t in rivals]

    def standard(half: Callable[[Head], Vector]) -> Vector:
        everywhere = [x for one in head.siblings for x in half(one)]
        centre = mean(everywhere)
        deviation = math.sqrt(sum((x - centre) ** 2 for x in everywhere) / (len(everywhere) - 1))
        return [(x - centre) / deviation for x in half(head)]

    scores = [blending * a + b for a, b in zip(standard(geometry), standard(attention), strict=True)]
    return [math.inf, *scores, math.inf, math.inf]


def standardised(scores: Vector) -> Vector:
    finite = [x for x in scores if math.isfinite(x)]
    distance = mean([abs(x - mean(finite)) for x in finite])
    return [(x - mean(finite)) / distance if math.isfinite(x) else x for x in scores]


def hybrid(head: Head, first: int) -> Vector:
    """2 h2o + 1 recency."""
    parts = standardised(attention_mean(head, first)), standardised([float(t) for t in range(head.length)])
    return [2 * a + b for a, b in zip(*parts, strict=True)]


def caote(head: Head, first: int) -> Vector:
    """Of h2o."""
    attention = attention_mean(head, first)
    alpha = [a / sum(attention) for a in attention]
    output = [sum(a * v[d] for a, v in zip(alpha, head.values, strict=True)) for d in range(len(head.values[0]))]
    # The output without the token, and the others' weights made to sum to one again.
    scores = []
    for gone, value in enumerate(head.values):
        left = [(o - alpha[gone] * v) / (1 - alpha[gone]) for o, v in zip(output, value, strict=True)]
        scores.append(norm([o - x for o, x in zip(output, left, strict=True)]))
    return scores


def graphkv(head: Head, first: int) -> Vector:
    """Of h2o; sources 0.4, neighbours 2."""
    scores = attention_mean(head, first)
    order = sorted(range(head.length), key=lambda t: (scores[t], t), reverse=True)
    left = list(scores)
    for place, source in enumerate(order[: math.floor(0.4 * head.length)]):
        below = order[place + 1 :]
        nearest = sorted(below, key=lambda t: cosine(head.keys[source], head.keys[t]), reverse=True)[:2]
        for t in nearest:
            left[t] *= 1 - min(max(cosine(head.keys[source], head.keys[t]), 0.0), 0.99)
    return left


def entropy(head: Head) -> Vector:
    """Per query, mean over the row's query heads, 0 to 1."""
    entropies = []
    for q in range(head.length):
        rows = [w[q] for one in head.siblings for w in one.weights]
        entropies.append(mean([-sum(x * math.log(x) for x in row if x > 0) / math.log(max(q + 1, 2)) for row in rows]))
    return entropies


def adaptive(head: Head, first: int) -> Vector:
    """h2o below 0.6, else recency; horizon 5."""
    entropies = entropy(head)
    weights = [math.exp(-(head.length - 1 - q) / 5) for q in range(head.length)]
    signal = sum(w * e for w, e in zip(weights, entropies, strict=True)) / sum(weights)
    return attention_mean(head, first) if signal < 0.6 else [float(t) for t in range(head.length)]


def _largest(head: Head, count: int) -> set[int]:
    """Tokens whose values span most, the first four before all."""
    spans = [math.inf if t < 4 else max(value) - min(value) for t, value in enumerate(head.values)]
    return set(sorted(range(head.length), key=lambda t: (spans[t], t), reverse=True)[:count])


def vase(head: Head, first: int) -> Vector:
    """Of attention_mean; without chance."""
    large, scores = _largest(head, 6), attention_mean(head, first)
    return [64.0 if t in large else math.log(scores[t]) for t in range(head.length)]


def vase_drawn(head: Head, first: int) -> Vector:
    """Of attention_mean, with chance; layer 1."""
    large, scores = _largest(head, 2), attention_mean(head, first)
    place = next(at for at, one in enumerate(head.siblings) if one is head)
    stream = mixed((mixed(mixed(place + 3) + 1) + head.length) & 0xFFFFFFFF)
    chances = [(mixed((stream + t) & 0xFFFFFFFF) >> 8) / 2**24 + 2**-25 for t in range(head.length)]
    drawn = [math.log(score) - math.log(-math.log(u)) for score, u in zip(scores, chances, strict=True)]
    return [64.0 if t in large else drawn[t] for t in range(head.length)]


#: A policy as text -> the loop.
SLOW_ATTENTION_POLICIES: dict[str, Slow] = {
    "h2o": h2o,
    "h2o(normalised=True, recent=0.25)": h2o_mean,
    "attention_mean": attention_mean,
    "kvzip": kvzip,
    "sage_kv": sage_kv,
    "sage_kv(window=4)": sage_kv_once,
    "tova": tova,
    "snapkv(window=6, kernel=3)": snapkv,
    "snapkv(window=6, pooling=max)": snapkv_max,
    "cake(window=6, kernel=3, gamma=5)": cake,
    "r_kv": r_kv,
    "roco": roco,
    "lru(top=3)": lru,
    "lfu(top=3)": lfu,
    "lra": lra,
    "lfa": lfa,
    "scissorhands(window=9, percentile=70)": scissorhands,
    "lazy_eviction(threshold=0.15, lag=3)": lazy_eviction,
    "expected_attention(future=7)": expected_attention,
    "expected_attention(future=7, horizon=5, epsilon=0.1)": expected_attention_fading,
    "expected_attention(future=7, covariance=False, value_norm=False)": expected_attention_mean,
    "lagkv(lag=4, n_sink=0, scope=all)": lagkv_all,
    "lagkv(lag=4, n_sink=2, value_weight=0.5)": lagkv,
    "leverage": leverage,
    "compactor(chunk=5, n_sink=1, n_recent=2, blending=0.7)": compactor,
    "compactor(chunk=5, n_sink=1, n_recent=2)": lambda head, first: compactor(head, first, 1 - BUDGET / head.length),
    "hybrid(attention_mean, recency, weights=(2, 1))": hybrid,
    "caote(attention_mean)": caote,
    "graphkv(attention_mean, sources=0.4, neighbours=2)": graphkv,
    "adaptive(attention_mean, recency, threshold=0.6, horizon=5)": adaptive,
    "vase(attention_mean, protected=0.75, stochastic=False)": vase,
    "vase(attention_mean, seed=3)": vase_drawn,
}
