"""Skeletons as earlier versions wrote them into checkpoints: pickled, in base 64 or base 85. They are read, and never written.

Nothing is imported or called that such a text names, but for what the reader is given: all else stands for itself, or is refused.
"""

from __future__ import annotations

import base64
import collections
import io
import pickle
from collections.abc import Callable
from typing import Any

from fleet.errors import ProtocolError

CLASSES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "Counter"): collections.Counter,
    ("collections", "deque"): collections.deque,
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, complex, bytearray, list, dict, tuple, int, float, str, bool)},
}
"""Of the standard library: what is plain data, and does nothing when it is made."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, find: Callable[[str, str], Any], resolve: Callable[[int], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._find, self._resolve = find, resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(int(pid))

    def find_class(self, module: str, name: str) -> Any:
        return CLASSES[module, name] if (module, name) in CLASSES else self._find(module, name)


def read_old(text: str, find: Callable[[str, str], Any], resolve: Callable[[int], Any]) -> dict[str, Any]:
    """{tracked name: state dict}; ``find`` gives what stands for a class that is not of the standard library, or raises ProtocolError.

    Raises ProtocolError when the text is no skeleton.
    """
    for decode in (lambda text: base64.b64decode(text, validate=True), base64.b85decode):
        try:
            state = _Unpickler(decode(text), find, resolve).load()
        except (ValueError, pickle.UnpicklingError, EOFError, TypeError, AttributeError, LookupError):
            continue
        if isinstance(state, dict) and all(isinstance(name, str) for name in state):
            return state
    raise ProtocolError("this is no skeleton of a training state")
