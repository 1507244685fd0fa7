"""Budgets of heads in the files of other projects.

Three projects read a table with a number for each layer and KV head, each in a form of its own: kvpress (`LUKVPress`),
Attention Matching (arXiv 2602.16284) and Tangram (arXiv 2606.06302).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from .calibration import load_calibration

#: Shares that are pruned, in percent, for which a curve of `LUKVPress` has a table.
_PERCENT = range(1, 100)
_FORMS = {".npy": "a curve of LUKVPress", ".json": "Attention Matching's table", ".npz": "a cluster map of Tangram"}
#: Halvings of an interval, for a float32's precision.
_HALVINGS = 60


def export_shares(
    profile: str | Path,
    path: str | Path,
    *,
    kept_share: float = 0.25,
    power: float = 1.0,
    group: int = 4,
    model: str = "",
) -> None:
    """Write the budgets of heads of a profile for another project.

    The name of the file says which one: `.npy` is the curve of kvpress' `LUKVPress`, `[99, layers, KV heads]` float32,
    the share of tokens that each head loses if 1 to 99 % of all are pruned. `.json` is the table of Attention Matching,
    `{"L0H0": share of the budget, ...}`, whose numbers sum to 1. `.npz` is the cluster map of Tangram's fork of vLLM:
    heads with similar budgets share pages.

    Args:
        profile: a profile that `prepare` wrote, see `Profile.path`.
        path: the new file.
        kept_share: share of the tokens that stay, in (0, 1]; a curve has all of them.
        power: exponent of the shares, see `allocator="heads"`.
        group: heads of a cluster of Tangram.
        model: name of the model, which Tangram compares.

    Raises:
        ValueError: there is no such profile, it has no budgets of heads, or they have no such form.
    """
    target = Path(path)
    _check_form(target)
    if not 0 < kept_share <= 1:
        raise ValueError(f"kept_share must be above 0 and at most 1, got {kept_share}.")
    calibration = load_calibration(profile)
    if calibration.shares is None:
        raise ValueError(f"The profile {str(profile)!r} has no budgets of heads: make it again with `prepare`.")
    shares, layers = calibration.shares, [*calibration.shares.layers]
    if len({table.shape[1] for table in shares.layers.values()}) != 1:
        raise ValueError("The layers of this model differ in their number of KV heads, which no such file can say.")

    def kept(share: float) -> Tensor:
        return _kept(torch.cat(shares.at(torch.tensor([share], device="cpu"))) ** power, share)

    if target.suffix == ".npy":
        count = int(calibration.model.get("num_hidden_layers", max(layers) + 1))
        curve = torch.zeros(len(_PERCENT), count, kept(kept_share).shape[1], device="cpu")
        for row, percent in enumerate(_PERCENT):
            curve[row, layers] = (1 - kept(1 - percent / 100)).float()  # layers that do not evict lose nothing
        np.save(target, curve.numpy())
    elif target.suffix == ".json":
        table = kept(kept_share)
        parts = (table / table.sum()).tolist()
        named = {f"L{layers[at]}H{head}": part for at, row in enumerate(parts) for head, part in enumerate(row)}
        target.write_text(json.dumps(named, indent=2), "utf-8")
    else:
        _save_clusters(target, kept(kept_share), layers, group, kept_share, model)


def import_shares(path: str | Path, *, kept_share: float = 0.25) -> Tensor:
    """Read budgets of heads from a file of another project, see `export_shares`.

    >>> cache = PagedEvictionCache(config, 1024, allocator=Heads.of(import_shares("curve.npy")))  # doctest: +SKIP

    Args:
        path: a file that ends in `.npy`, `.json` or `.npz`.
        kept_share: share of the tokens that stay, which selects the table of a curve.

    Returns:
        `[layers, KV heads]` float64, positive, with the mean 1. Layers of a curve that lose nothing at any size are
        left out, because they do not evict.

    Raises:
        ValueError: the file is missing, or it is not of this form.
    """
    source = Path(path)
    _check_form(source)
    read = {".npy": _of_curve, ".json": _of_names, ".npz": _of_clusters}[source.suffix]
    try:
        table = read(source, kept_share)
    except (OSError, KeyError, TypeError, ValueError, BadZipFile) as error:
        raise ValueError(f"{str(source)!r} is not {_FORMS[source.suffix]}: {error}.") from error
    if table.ndim != 2 or not table.numel() or not (table.isfinite().all() and (table > 0).all()):
        raise ValueError(f"{str(source)!r} is not {_FORMS[source.suffix]}: its numbers must be positive.")
    return table / table.mean()


def _check_form(path: Path) -> None:
    if path.suffix not in _FORMS:
        known = ", ".join(f"{suffix} ({form})" for suffix, form in _FORMS.items())
        raise ValueError(f"{str(path)!r} must end in one of {known}.")


def _kept(shares: Tensor, kept_share: float) -> Tensor:
    """The share of its tokens that each head keeps, `[layers, KV heads]`: proportional to `shares`, at most all, with
    the mean `kept_share`."""
    shares = shares.double() / shares.double().max()
    low, high = 0.0, 1 / float(shares.min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if (middle * shares).clamp_max(1).mean() > kept_share else (middle, high)
    return (high * shares).clamp_max(1)


def _save_clusters(path: Path, kept: Tensor, layers: list[int], group: int, kept_share: float, model: str) -> None:
    count, heads = kept.shape
    if group < 1 or count * heads % group:
        raise ValueError(f"group={group} does not divide the {count} x {heads} heads of this model.")
    order = kept.flatten().argsort(descending=True, stable=True).view(-1, group).sort(1).values
    cluster, column = torch.empty(2, count * heads, dtype=torch.int32, device="cpu")
    cluster[order] = torch.arange(len(order), dtype=torch.int32, device="cpu")[:, None].expand_as(order)
    column[order] = torch.arange(group, dtype=torch.int32, device="cpu").expand_as(order)
    facts = {
        "source_model": model,
        "page_group_size": group,
        "num_layers": count,
        "static_layer_ids": layers,
        "num_kv_heads": heads,
        "num_clusters": len(order),
        "cluster_scope": "global",
    }
    np.savez(
        path,
        cluster_of=cluster.view(count, heads).numpy(),
        column_of=column.view(count, heads).numpy(),
        cluster_members=torch.stack([order // heads, order % heads], -1).int().numpy(),
        rank_score=kept.float().numpy(),
        page_group_size=np.int32(group),
        base_ratio=np.float32(kept_share),
        meta=np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8),
    )


def _of_curve(path: Path, kept_share: float) -> Tensor:
    curve = torch.from_numpy(np.load(path, allow_pickle=False)).double()
    if curve.ndim != 3 or len(curve) != len(_PERCENT):
        raise ValueError(f"its shape is {list(curve.shape)}, expected [{len(_PERCENT)}, layers, KV heads]")
    evicting = (curve > 0).flatten(2).any(2).any(0)
    place = min(max((1 - kept_share) * 100 - 1, 0.0), len(curve) - 1.0)
    low = min(int(place), len(curve) - 2)
    pruned = torch.lerp(curve[low], curve[low + 1], place - low)
    return (1 - pruned[evicting]).clamp_min(1e-6)


def _of_names(path: Path, kept_share: float) -> Tensor:
    named: Mapping[str, float] = json.loads(path.read_text("utf-8"))
    if not isinstance(named, dict):
        raise TypeError("it is not a JSON object")
    places = {}
    for name, part in named.items():
        layer, _, head = name.removeprefix("L").partition("H")
        places[int(layer), int(head)] = float(part)
    layers, heads = sorted({layer for layer, _ in places}), sorted({head for _, head in places})
    return torch.tensor(
        [[places[layer, head] for head in heads] for layer in layers], dtype=torch.float64, device="cpu"
    )


def _of_clusters(path: Path, kept_share: float) -> Tensor:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return torch.from_numpy(arrays["rank_score"]).double()
