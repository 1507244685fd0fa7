"""The drawings of "How it works": `python docs/images/draw.py` writes them next to itself.

Narrow and with large letters, so that they can be read on a telephone.
"""

from collections.abc import Sequence
from pathlib import Path

CELL, WIDTH = 34, 480
HELD, NEW, OLD, PAD, SINK, NEWEST = "#e8e8e8", "#0072B2", "#f2c4a8", "#ffffff", "#bbbbbb", "#9ecae8"
#: A slot: what is written in it, and its colour.
Slot = tuple[str, str]


class Drawing:
    """Rows of slots with a line of text above each."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 6

    def text(self, words: str, bold: bool = False, x: int = 8) -> None:
        self.y += 20
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x}" y="{self.y - 4}" fill="#222222"{weight}>{words}</text>')

    def slots(self, slots: Sequence[Slot], block: int = 4, chosen: int | None = None, size: int = CELL) -> None:
        """Blocks stand apart; `chosen` is outlined."""
        self.y += 4
        for at, (label, colour) in enumerate(slots):
            x = 8 + at * size + (at // block) * 8
            ink = "#ffffff" if colour == NEW else "#222222"
            dash = ' stroke-dasharray="3 3"' if colour == PAD else ""
            self.parts.append(
                f'<rect x="{x}" y="{self.y}" width="{size}" height="30" fill="{colour}" stroke="#888888"{dash}/>'
                f'<text x="{x + size / 2:g}" y="{self.y + 20}" text-anchor="middle" fill="{ink}">{label}</text>'
            )
            if chosen is not None and at == chosen * block:
                self.parts.append(
                    f'<rect x="{x - 2}" y="{self.y - 2}" width="{size * block + 4}" height="34" fill="none" '
                    'stroke="#D55E00" stroke-width="3"/>'
                )
        self.y += 40

    def key(self, *entries: tuple[str, str]) -> None:
        for colour, words in entries:
            dash = ' stroke-dasharray="3 3"' if colour == PAD else ""
            self.parts.append(
                f'<rect x="8" y="{self.y + 4}" width="15" height="15" fill="{colour}" stroke="#888888"{dash}/>'
            )
            self.text(words, x=30)

    def svg(self) -> str:
        """The picture as text."""
        height = self.y + 10
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="14">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def plain(first: int, last: int, colour: str = HELD) -> list[Slot]:
    return [(str(number), colour) for number in range(first, last + 1)]


def growing() -> Drawing:
    drawing = Drawing()
    drawing.text("5 tokens seen: new ones are appended", bold=True)
    drawing.slots([*plain(0, 3, SINK), ("4", NEW)])
    drawing.text("12 seen: all slots in use; block 1 scores lowest", bold=True)
    drawing.slots([*plain(0, 3, SINK), *plain(4, 7), *plain(8, 11, NEWEST)], chosen=1)
    drawing.text("14 seen: two of its tokens are overwritten", bold=True)
    drawing.slots([*plain(0, 3, SINK), *plain(12, 13, NEW), *plain(6, 7, OLD), *plain(8, 11)], chosen=1)
    drawing.text("16 seen: it is the newest block; the next is chosen", bold=True)
    drawing.slots([*plain(0, 3, SINK), *plain(12, 15, NEWEST), *plain(8, 11)], chosen=2)
    drawing.key((SINK, "never evicted"), (OLD, "goes next, attended to until overwritten"), (NEW, "new"))
    drawing.key((NEWEST, "newest block, not evicted now"))
    return drawing


def padded() -> Drawing:
    drawing = Drawing()
    pads = [("", PAD)] * 3
    drawing.text("A row with 3 pads; the batch has seen 12 columns", bold=True)
    drawing.slots([*pads, *plain(0, 3, SINK), *plain(4, 8)], block=12)
    drawing.text("13 columns: token 9 takes the last pad's slot", bold=True)
    drawing.slots([*pads[:2], ("9", NEW), *plain(0, 3, SINK), *plain(4, 8)], block=12)
    drawing.text("15 columns: no pads are left", bold=True)
    drawing.slots([("11", NEW), ("10", NEW), ("9", NEW), *plain(0, 3, SINK), *plain(4, 8)], block=12)
    drawing.text("The same in logical order, cut into blocks", bold=True)
    drawing.slots([*plain(0, 3, SINK), *plain(4, 7), *plain(8, 11, NEWEST)])
    drawing.key((PAD, "a pad: always the lowest slots, hidden by the mask"), (SINK, "never evicted"), (NEW, "new"))
    return drawing


def overflow() -> Drawing:
    """A budget of 12 in blocks of 4, so that something is left to choose."""
    drawing = Drawing()
    size = 27
    held = [*plain(0, 3, SINK), *plain(4, 7), *plain(8, 11)]
    drawing.text("Held: 12 tokens, the budget", bold=True)
    drawing.slots(held, size=size)
    drawing.text("4 new tokens: attention sees all 16", bold=True)
    drawing.slots([*held, *plain(12, 15, NEW)], size=size)
    drawing.text("Then the worst 4 go, token by token", bold=True)
    lost = [(label, OLD if label in ("4", "5", "8", "11") else colour) for label, colour in held]
    drawing.slots([*lost, *plain(12, 15, NEWEST)], size=size)
    drawing.text("What stays is sorted and cut into blocks anew", bold=True)
    kept = [(label, HELD) for label in ("6", "7", "9", "10")]
    drawing.slots([*plain(0, 3, SINK), *kept, *plain(12, 15, NEWEST)], size=size)
    drawing.key((SINK, "never evicted"), (NEWEST, "newest tokens, not evicted now"), (OLD, "evicted"))
    return drawing


DRAWINGS = {"growing.svg": growing, "padded.svg": padded, "overflow.svg": overflow}


def main() -> None:
    for name, draw in DRAWINGS.items():
        (Path(__file__).parent / name).write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    main()
