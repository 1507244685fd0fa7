"""Fit a basis to a model: what `paged-eviction fit-basis` does."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from time import monotonic

from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_paged_eviction.internals import Window, model_fingerprint
from hf_paged_eviction_eval.caches.fitting.reading import check_output, read_windows, token_bar
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.settings import TextSettings
from hf_paged_eviction_eval.running.terminal import say
from hf_paged_eviction_eval.store.summaries.table import Table, simple_table
from hf_paged_eviction_eval.store.summaries.terminal import to_terminal

from ..low_rank.basis import Basis, save_basis
from ..low_rank.fit import Sums, Worth, add_windows, solve

#: Seconds between two writings of what was found so far.
_EVERY = 20.0


def run_fit_basis(settings: TextSettings, output: Path, tokens: int) -> Basis:
    """Fit a basis to some texts, write the file, and print what its directions are worth.

    What was read is written beside the output from time to time; the same command continues there.

    Args:
        settings: model, device and texts; `length` is that of a window.
        output: the file to write, `*.safetensors`.
        tokens: how many to read, in all.

    Raises:
        UserError: the output cannot be written, the texts are too short, or the model has no use for a basis.
    """
    notes = Console(stderr=True)
    check_output(output, "a basis")
    model, windows = read_windows(settings, tokens)
    part = _Part(output.with_suffix(".part"), _digest(windows, settings, model_fingerprint(model)))
    sums, read = part.load()
    try:
        with token_bar(notes) as bar:
            done = sum(window.count for window in windows[:read])
            task = bar.add_task("reading", total=sum(window.count for window in windows), completed=done)
            add_windows(
                model,
                windows[read:],
                sums,
                lambda count: bar.advance(task, count),
                lambda count: part.save(sums, read + count),
            )
        basis, worth = solve(sums, model)
    except ValueError as error:
        raise UserError(f"cannot fit a basis to {settings.model!r}: {error}") from error
    save_basis(basis, output)
    part.remove()
    Console().print(to_terminal(report_table(worth)))
    read_all = f"{basis.facts['tokens']} tokens in {len(windows)} windows"
    say(notes, f"{read_all}; written to {output}: bits='low_rank:{output}(rank=R)'")
    return basis


def _digest(windows: list[Window], settings: TextSettings, model: Mapping[str, str]) -> str:
    """Of all that the sums depend on."""
    digest = sha256(json.dumps([settings.model, settings.revision, dict(model)], default=str).encode())
    for window in windows:
        digest.update(str(window.tokens.tolist()).encode())
    return digest.hexdigest()


@dataclass
class _Part:
    """What was found so far, as a file.

    Attributes:
        path: where.
        digest: of the work that it belongs to.
        written: when it was last written, on a clock that never goes back.
    """

    path: Path
    digest: str
    written: float = 0.0

    def load(self) -> tuple[dict[int, Sums], int]:
        """The sums, and how many windows are in them; nothing where the file is of other work, or damaged."""
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("digest") != self.digest:
                    return {}, 0
                layers = sorted({int(name.split(".")[0]) for name in file.keys()})  # noqa: SIM118 - no dictionary
                names = [field.name for field in fields(Sums)]
                sums = {at: Sums(*(file.get_tensor(f"{at}.{name}") for name in names)) for at in layers}
                return sums, int(metadata["windows"])
        except (OSError, SafetensorError, KeyError, ValueError):
            return {}, 0

    def save(self, sums: Mapping[int, Sums], windows: int) -> None:
        """Write them, unless that was done just now."""
        if monotonic() - self.written < _EVERY:
            return
        tensors = {f"{at}.{name}": tensor.contiguous() for at, of in sums.items() for name, tensor in vars(of).items()}
        new = self.path.with_suffix(".new")
        save_file(tensors, new, {"digest": self.digest, "windows": str(windows)})
        os.replace(new, self.path)
        self.written = monotonic()

    def remove(self) -> None:
        """It is not needed any more."""
        self.path.unlink(missing_ok=True)


def report_table(worth: Mapping[int, Worth]) -> Table:
    """Per layer, what the first directions hold."""
    dim = len(next(iter(worth.values())).keys)
    ranks = [dim // 4, dim // 2, 3 * dim // 4]
    titles = {
        "keys": "products of keys and queries",
        "rotated": "keys alone",
        "plain": "keys before rotation",
        "values": "values",
    }
    rows = (
        (index, title, *(f"{100 * float(getattr(of, name)[rank - 1]):.1f} %" for rank in ranks))
        for index, of in sorted(worth.items())
        for name, title in titles.items()
    )
    names = ("layer", "variance of", *(f"rank {rank}" for rank in ranks))
    title = "Share of the variance that the first directions hold, mean of the KV heads"
    return simple_table(title, names, rows, head=2)
