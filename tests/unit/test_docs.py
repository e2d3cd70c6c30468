"""The documentation leads somewhere: links, names of files, the lists in the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
FOLDERS = "benchmarks|colloid|docs|examples|scripts|tests"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", link):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name}: no file {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: no heading {link}"
    for name in re.findall(rf"(?<![\w/.])((?:{FOLDERS})/[\w/.-]+\.(?:py|sh|md|yaml|json))\b", text):
        assert "/NAME/" in name or (ROOT / name).exists(), f"{page.name}: no file {name}"


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_lists_every_page_and_every_example():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(((?:docs|examples)/[\w./-]+)\)", readme))
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    examples = {f"examples/{page.parent.name}" for page in (ROOT / "examples").glob("*/README.md")}
    assert pages | examples <= listed


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*/run.sh")), ids=lambda path: path.parent.name)
def test_an_example_says_its_own_command(script):
    command = f"bash examples/{script.parent.name}/run.sh --cpu"
    assert command in script.read_text(encoding="utf-8")
    assert command in (script.parent / "README.md").read_text(encoding="utf-8")
