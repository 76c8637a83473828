"""The folders of a run's files. This module does not import torch: a driver uses it, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Home:
    """The folders of a run's files. ``work``: the working directory of its ranks; None: the one that they start in.

    ``base``: a URL under which relative paths are written, where nodes share no folder; empty: nodes share a folder.
    """

    folder: Path = field(default_factory=Path.cwd)
    is_twin: bool = False
    work: Path | None = None
    base: str = ""

    def target(self, path: str) -> str:
        """Where ``run.save(path)`` writes: an absolute path or a URL. A twin always writes under its working directory."""
        if "://" in path:
            parts = urlsplit(path)
            return path if not self.is_twin else str(self._work / parts.scheme / parts.netloc / parts.path.lstrip("/"))
        if self.base and not Path(path).is_absolute():
            return f"{self.base}/{path}"
        inside = Path(path).is_relative_to(self._work)
        return str(self._work / (Path(path).relative_to("/") if self.is_twin and Path(path).is_absolute() and not inside else path))

    @property
    def _work(self) -> Path:
        return self.work or Path.cwd()
