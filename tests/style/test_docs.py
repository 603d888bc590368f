"""The documents agree with the code and with each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loopwright.callbacks import callback
from loopwright.callbacks.callback import Callback

from ..nursery import nursery

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]
EVENTS = [name for name in vars(Callback) if name.startswith("on_")]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The fragments that the headings of a page make."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"\w+:", link):
            continue
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    assert not broken


def test_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= set(re.findall(r"\]\((\w[\w-]*\.md)\)", index))


def events_named_in(text: str) -> list[str]:
    """Names of events in the order of the text; `on_x_start/_end` means both."""
    names = []
    for name, end in re.findall(r"\b(on_[a-z_]+?)(_start/_end)?\b(?!/)", text):
        names += [f"{name}_start", f"{name}_end"] if end else [name]
    return names


def test_timeline_of_the_callback_module_is_the_order_of_its_methods() -> None:
    assert callback.__doc__ is not None
    _, timeline, rest = callback.__doc__.split("```")
    drawn = events_named_in(timeline)
    assert drawn == [name for name in EVENTS if name in drawn]
    own_prefix = {name.replace("validation", stage) for name in drawn for stage in ("test", "predict")}
    assert set(EVENTS) == {*drawn, *events_named_in(rest), *own_prefix}


def test_events_page_draws_the_same_timeline_and_names_every_event() -> None:
    assert callback.__doc__ is not None
    page = (ROOT / "docs" / "events.md").read_text()
    (drawn,) = (block for block in page.split("```")[1::2] if "on_fit_start" in block)
    timeline = events_named_in(drawn)
    assert timeline == events_named_in(callback.__doc__.split("```")[1])
    own_prefix = {name.replace("validation", stage) for name in timeline for stage in ("test", "predict")}
    assert set(EVENTS) <= {*events_named_in(page), *own_prefix}


def test_every_event_says_when_it_fires() -> None:
    assert [name for name in EVENTS if not getattr(Callback, name).__doc__] == []


def quick_start() -> str:
    (block, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(block)


def test_quick_start_of_the_readme_runs(tmp_path: Path) -> None:
    (tmp_path / "quick_start.py").write_text(quick_start())
    run = nursery().run("quick_start.py", timeout=100)
    assert run.returncode == 0, run.stderr
    assert "test/accuracy" in run.stdout
