"""Links between the pages, and every `make` verb that a page names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_VERB = re.compile(r"\bmake ((?:[a-z0-9]+-)*[a-z0-9]+)\b")


def pages() -> list[Path]:
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return [ROOT / path for path in found if not any(p.startswith(".") for p in path.parts)]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_what_pages_link_to_is_there_and_no_picture_is_left_over() -> None:
    found: set[Path] = set()
    for page in pages():
        for link in _LINK.findall(page.read_text()):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
            found.add(target)
    pictures = set((ROOT / "docs" / "images").iterdir())
    assert pictures and pictures <= found, pictures - found


def test_every_verb_that_pages_name_exists() -> None:
    verbs = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in pages():
        code = re.findall(r"`([^`\n]+)`|^(make [^\n]+)$", page.read_text(), re.MULTILINE)
        for part in (part for pair in code for part in pair if part.startswith("make ")):
            for verb in _VERB.findall(part)[:1]:
                assert verb in verbs, f"{page.name}: {part}"
