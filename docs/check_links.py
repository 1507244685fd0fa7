"""Check that built pages lead nowhere that is not there, and load nothing from elsewhere: no network is asked.

python docs/check_links.py docs/_build/html
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Attributes that make a browser fetch something by itself.
LOADS = {("img", "src"), ("script", "src"), ("source", "src"), ("iframe", "src"), ("video", "src"), ("object", "data")}
STYLE_RELATIONS = {"stylesheet", "icon", "preload", "preconnect", "modulepreload", "shortcut icon"}


class Page(HTMLParser):
    """Anchors of a page, where it leads, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value for name, value in attrs if value is not None}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        for name, value in attributes.items():
            if (tag, name) in LOADS or (tag == "link" and name == "href" and attributes.get("rel") in STYLE_RELATIONS):
                self.loads.append(value)
            elif name == "href":
                self.links.append(value)


def problems(folder: Path) -> list[str]:
    """One line for each link that leads nowhere and each thing that is loaded from elsewhere."""
    pages = {path: Page(path) for path in sorted(folder.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        name = path.relative_to(folder)
        broken += [f"{name} loads {target}" for target in page.loads if _is_elsewhere(target)]
        for target in dict.fromkeys([*page.links, *page.loads]):
            if not _is_elsewhere(target) and not target.startswith(("mailto:", "data:")):
                broken += [f"{name} leads to {target}: {reason}" for reason in _broken(path, target, pages)]
    styles = [path for path in folder.rglob("*.css") if "url(http" in path.read_text("utf-8").replace('"', "")]
    return broken + [f"{path.relative_to(folder)} loads from elsewhere" for path in styles]


def _is_elsewhere(target: str) -> bool:
    return bool(urlsplit(target).netloc)


def _broken(page: Path, target: str, pages: dict[Path, Page]) -> list[str]:
    parts = urlsplit(target)
    file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not file.is_file():
        return ["there is no such file"]
    anchor = unquote(parts.fragment)
    target_page = pages.get(file)
    if anchor and target_page is not None and anchor not in target_page.anchors:
        return ["the page has no such place"]
    return []


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    broken = problems(folder)
    print("\n".join(broken) or f"{len(list(folder.rglob('*.html')))} pages: all links inside lead somewhere")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
