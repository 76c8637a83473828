"""A tensor that Fleet makes in a rank names its device: a script may have set another one for those that name none."""

from __future__ import annotations

import ast

from tests.tidy.rules import nodes, parsed
from tests.tidy.test_tidy import PYTHON

MAKERS = {"arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "tensor", "zeros"}
IN_RANKS = ("actors/rank/", "storage/")
A_SCRIPT = "actors/rank/rehearsed.py"
"""It stands for a user's."""


def without_device(path: str, text: str) -> list[str]:
    """``path:line`` of calls that make a tensor where the script's default device says."""
    calls = [node for node in nodes(parsed(text)) if isinstance(node, ast.Call)]
    return [f"{path}:{call.lineno}" for call in calls if _makes(call.func) and not any(each.arg == "device" for each in call.keywords)]


def _makes(called: ast.expr) -> bool:
    match called:
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return name in MAKERS
    return False


def test_tensors_of_ranks_name_their_device() -> None:
    texts = {path: text for path, text in PYTHON.items() if path.startswith(IN_RANKS) and path != A_SCRIPT}
    assert len(texts) > 100
    faults = [fault for path, text in texts.items() for fault in without_device(path, text)]
    assert not faults, "add device=: " + ", ".join(faults)


def test_one_that_names_none_is_found() -> None:
    assert without_device("a.py", "import torch\nx = torch.zeros(2)\ny = torch.zeros(2, device=x.device)\n") == ["a.py:2"]
