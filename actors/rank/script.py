"""A user's script for ranks: its text, which each process executes from the first line on, as with ``torchrun``.

So no object of the script has to be sent, and settings of its top level are in force in each rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass, replace
from importlib.abc import InspectLoader
from pathlib import Path
from types import ModuleType
from typing import Any

FUNCTION = "train"


@dataclass(frozen=True)
class Script:
    """A script with a train function. A call executes the script in this process, and then calls the function.

    Attributes:
        name: its module's ``__name__``; never ``__main__``.
        file: its path. A relative path begins in the working directory of the process that executes it, as for ``folder``.
        text: the file's contents when the run began: later processes execute the same text.
        folder: the folder of the modules beside it, for imports; empty: none.
        arguments: ``sys.argv`` after the script.
        imports: import statements of installed modules from its first lines: a process can carry them out ahead of time.
    """

    name: str
    file: str
    text: bytes
    folder: str
    arguments: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()

    @property
    def is_module(self) -> bool:
        """Whether it was named as a module of a package, as for ``python -m``."""
        return "." in self.name

    def __call__(self, run: Any) -> None:
        getattr(self.execute(), FUNCTION)(run)

    def execute(self) -> ModuleType:
        """Execute the script as a new module. Raises the errors of its top level."""
        file = str(Path(self.file).absolute())
        sys.argv = [file, *self.arguments]
        if self.folder and sys.path[:1] != [folder := str(Path(self.folder).absolute())]:
            sys.path.insert(0, folder)
        package, _, child = self.name.rpartition(".")
        above = importlib.import_module(package) if package else None
        spec = importlib.util.spec_from_file_location(self.name, file, loader=_Text(file, self.text))
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.name] = module
        try:
            exec(compile(self.text, file, "exec", dont_inherit=True), module.__dict__)
        except BaseException:
            del sys.modules[self.name]
            raise
        if above is not None:
            setattr(above, child, module)
        return module

    def carried(self, code: Path | None) -> Script:
        """The script for ranks of other machines. Their working directory has the files of the folder ``code``; None: they have none."""
        file, folder = Path(self.file), Path(self.folder)
        if code is None or not folder.is_relative_to(code):
            return replace(self, folder="")
        here = file.relative_to(code) if file.is_relative_to(code) else file
        return replace(self, file=str(here), folder=str(folder.relative_to(code)))


class _Text(InspectLoader):
    """Gives ``inspect`` and tracebacks the lines of the script."""

    def __init__(self, file: str, text: bytes) -> None:
        self._file, self._text = file, text

    def get_source(self, fullname: str) -> str:
        """See ``InspectLoader``."""
        return importlib.util.decode_source(self._text)

    def get_filename(self, fullname: str) -> str:
        """Where the script lies."""
        return self._file

    def is_package(self, fullname: str) -> bool:
        """See ``InspectLoader``."""
        return False
