"""Checks that Python finds Fleet's own packages: their names are ordinary words."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

from fleet.errors import ConfigError
from fleet.host.extras import WHERE

DISTRIBUTION = "fleet-train"
PACKAGES = ("fleet", "actors", "policies", "storage", "dashboards", "chaos")


def check_not_shadowed() -> None:
    """Raises ConfigError when Python would import another package of the same name, or a file that another distribution put over Fleet's.

    The names of Fleet's packages are ordinary words.
    """
    ours = Path(__file__).resolve().parents[2]
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        where = Path(found.origin).resolve() if found is not None and found.origin else None
        if where is None or where.parent.parent != ours:
            raise ConfigError(
                "package", name, f"Python finds {where or 'nothing'} for it instead of Fleet's own in {ours}",
                "Rename your module, or remove its folder from PYTHONPATH.",
            )  # fmt: skip
    for name in _written_over():
        raise ConfigError(
            "package", name, f"{ours / name / '__init__.py'} is not the file that came with Fleet: another distribution has that name",
            "Give each an environment of its own, or uninstall the other and run pip install --force-reinstall --no-deps FLEET, "
            f"where {WHERE}.",
        )  # fmt: skip


def _written_over() -> list[str]:
    """Packages of an installed wheel whose first file differs from the installed one; a checkout records no such files."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    begins = [file for file in files if file.name == "__init__.py" and file.parts[0] in PACKAGES and len(file.parts) == 2]
    return [file.parts[0] for file in begins if file.hash is not None and _digest(file, file.hash.mode) != file.hash.value]


def _digest(file: importlib.metadata.PackagePath, mode: str) -> str:
    """The digest in the form of the list of installed files."""
    return base64.urlsafe_b64encode(hashlib.new(mode, file.read_binary()).digest()).rstrip(b"=").decode()
