"""The documents as a site: it builds without a warning, has no broken link, and fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.blocks import ROOT

OUTSIDE = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^"'> ]+|@import\s+url\(["']?(?:https?:)?//""")


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_it_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 20
    found = {str(page.relative_to(site)): match[0] for page in pages if (match := OUTSIDE.search(page.read_text()))}
    assert not found


def test_every_public_name_is_in_the_reference_and_says_what_it_is(site: Path) -> None:
    import fleet.data
    from actors.rank import loop, once
    from actors.rank.step import step

    page = (site / "api.html").read_text()
    of_classes = [
        f"{cls.__module__}.{cls.__qualname__}.{name}"
        for cls in (loop.Run, step.Step, once.EvaluationFigures)
        for name, value in vars(cls).items()
        if not name.startswith("_") and name not in ("close", "judged", "fetch") and (callable(value) or isinstance(value, property))
    ]
    assert len(of_classes) > 12
    data = [f"fleet.data.{name}" for name in fleet.data.__all__]
    assert [name for name in (*of_classes, *data) if f'id="{name}"' not in page] == []
    assert not re.findall(r":(?:meth|class|func|mod):", page), "the site is in Markdown"


def test_every_document_is_in_the_site(site: Path) -> None:
    documents = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert documents == {path.relative_to(site) for path in site.rglob("*.html")} - {Path("404.html")}


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# One\n\n[none](index.md#two)\n")
    whole = (ROOT / "mkdocs.yml").read_text()
    config = tmp_path / "mkdocs.yml"
    config.write_text(whole[: whole.index("\nnav:")] + "\n")
    done = build(tmp_path / "site", config)
    assert done.returncode != 0 and "two" in done.stderr
    (tmp_path / "docs" / "index.md").write_text("# One\n\n[one](index.md#one)\n")
    done = build(tmp_path / "site", config)
    assert done.returncode == 0, done.stderr
