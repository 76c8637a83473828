"""Folders that train functions report as checkpoints: unchanged copies under a run's store, each under a name of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from storage.backends.files import copy_in, open_files

FOLDER = "reported"


class ReportedFolders:
    """The reported folders of one run, whose checkpoints lie under ``url``. All methods raise OSError when the store fails.

    A folder that is only half written has no record: its writer has died. Each folder has a name that was never used before.
    """

    def __init__(self, url: str) -> None:
        self.url = f"{url.rstrip('/')}/{FOLDER}"
        self._local = Path(self.url.removeprefix("file://")) if "://" not in url or url.startswith("file://") else None

    def put(self, name: str, folder: Path) -> None:
        """Copy all files of a local folder, with those in its subfolders, to ``name``; they exist when this returns."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files:
            inner = f"{name}/{path.relative_to(folder).parent.as_posix()}".removesuffix("/.")
            copy_in(open_files(f"{self.url}/{inner}"), path.name, path)

    def names(self) -> list[str]:
        """First parts of the names of all existing folders, whole or not."""
        return open_files(self.url).directories()

    def remove(self, name: str) -> None:
        """Remove it with all else under the first part of its name. Without effect when there is none."""
        first = name.partition("/")[0]
        if self._local is not None:
            shutil.rmtree(self._local / first, ignore_errors=True)
        else:
            open_files(self.url).remove(first)

    def there(self, name: str) -> bool:
        """Whether it exists."""
        return name.partition("/")[0] in self.names()

    def where(self, name: str) -> tuple[str, Any]:
        """(path, pyarrow file system, None for the local one) of a folder, as ``ray.train.Checkpoint`` takes them."""
        if self._local is not None:
            return str(self._local / name), None
        import fsspec
        from pyarrow.fs import FSSpecHandler, PyFileSystem

        files, path = fsspec.core.url_to_fs(f"{self.url}/{name}")
        return path, PyFileSystem(FSSpecHandler(files))
