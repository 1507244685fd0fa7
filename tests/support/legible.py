"""Whether a picture can be read: no text leaves it, and none meets another."""

import re
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text
from matplotlib.textpath import TextPath
from matplotlib.transforms import Bbox

Box = tuple[str, Bbox]
#: Less than this is rounding.
_PIXEL = 1.0


def problems(boxes: list[Box], page: Bbox) -> list[str]:
    """What is wrong, in words; empty if nothing is."""
    outside = [f"{text!r} leaves the picture" for text, box in boxes if _leaves(box, page)]
    meeting = []
    for (one, box), (other, beside) in combinations(boxes, 2):
        width, height = min(box.x1, beside.x1) - max(box.x0, beside.x0), min(box.y1, beside.y1) - max(box.y0, beside.y0)
        if min(width, height) >= _PIXEL:
            meeting.append(f"{one!r} meets {other!r}")
    return outside + meeting


def _leaves(box: Bbox, page: Bbox) -> bool:
    return bool(min(box.x0 - page.x0, box.y0 - page.y0, page.x1 - box.x1, page.y1 - box.y1) < -_PIXEL)


def of_figure(figure: Any) -> list[str]:
    """The problems of a figure of matplotlib, as it would be saved."""
    own, canvas = figure.canvas, FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_canvas(own)
    renderer = canvas.get_renderer()
    unseen = {id(label) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in _unseen(axis)}
    shown = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown if id(text) not in unseen]
    legends = [legend for legend in figure.legends if _leaves(legend.get_window_extent(renderer), figure.bbox)]
    return problems(boxes, figure.bbox) + ["a legend leaves the picture" for _ in legends]


def _unseen(axis: Any) -> list[Text]:
    """Labels of ticks that an axis does not reach, or of one that is switched off."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    off = not axis.get_visible() or not axis.axes.axison
    labels = [label for tick in ticks for label in (tick.label1, tick.label2)]
    if off:
        return [*labels, axis.label]
    return [
        label
        for tick in ticks
        for label, on in ((tick.label1, tick.label1.get_visible()), (tick.label2, tick.label2.get_visible()))
        if not on or not low <= tick.get_loc() <= high
    ]


def of_drawing(path: Path) -> list[str]:
    """The problems of an SVG drawn by hand, whose texts have no more than a place and classes, in DejaVu Sans."""
    root = ElementTree.parse(path).getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    style = "".join(root.itertext())
    sizes = {name: float(size) for name, size in re.findall(r"\.(\w+) \{ font-size: ([\d.]+)px", style)}
    boxes = []
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        classes = text.attrib.get("class", "").split()
        size = next((sizes[name] for name in classes if name in sizes), 14.0)
        font = FontProperties(family="DejaVu Sans", weight="bold" if "title" in classes else "normal")
        extent = TextPath((0, 0), text.text, size=size, prop=font).get_extents()
        shift = -extent.width / 2 if "middle" in classes else 0.0
        x, y = float(text.attrib["x"]) + shift, float(text.attrib["y"])
        boxes.append((str(text.text), Bbox.from_extents(x, y - extent.y1, x + extent.x1, y - extent.y0)))
    assert boxes, path
    return problems(boxes, Bbox.from_extents(0, 0, width, height))
