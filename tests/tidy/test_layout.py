"""No module imports itself by way of others or uses another's private names; rooms, zones and classes are few or small."""

from __future__ import annotations

from tests.tidy import layout, rules
from tests.tidy.test_tidy import PYTHON, shipped

SHIPPED = {path: text for path, text in PYTHON.items() if shipped(path)}


def test_no_modules_import_each_other() -> None:
    assert len(SHIPPED) > 200
    assert not [sorted(circle) for circle in layout.circles(SHIPPED)]


def test_no_module_uses_the_private_names_of_another() -> None:
    faults = layout.private_faults(SHIPPED)
    assert not faults, "\n".join(["", *faults])


def test_a_circle_is_found_wherever_the_import_stands() -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fleet.a import A\n"
    within = "def f():\n    from fleet import a\n"
    for back in (typed, within):
        assert layout.circles({"fleet/a.py": "import fleet.b\n", "fleet/b.py": back}) == {frozenset({"fleet.a", "fleet.b"})}
    assert layout.circles({"fleet/a.py": "import fleet.b\n", "fleet/b.py": "import json\n"}) == set()


def test_private_names_of_another_module_are_found() -> None:
    owner = "class A:\n    def __init__(self):\n        self._x = 1\n\n\ndef _f():\n    pass\n"
    for use in ("def g(a):\n    a._x = 2\n", "def g(a):\n    return a._x\n", "from fleet.a import _f\n", "from fleet import a\na._f()\n"):
        assert layout.private_faults({"fleet/a.py": owner, "fleet/b.py": use}), use
    for use in ("class B:\n    def f(self):\n        self._x = 1\n", "import os\nos._exit(1)\n"):
        assert not layout.private_faults({"fleet/a.py": owner, "fleet/b.py": use}), use


def test_a_room_stays_small_enough_to_be_seen_at_once() -> None:
    entries = {path.split("/")[1] for path in SHIPPED if path.startswith("fleet/")} | {"py.typed"}
    assert len(entries) <= 16, sorted(entries)


def test_there_are_few_zones_and_each_is_somebodys() -> None:
    assert rules.zone_faults(rules.ZONES, PYTHON) == []


MOST_ATTRIBUTES = 20


def test_classes_hold_few_things() -> None:
    found = {name: count for name, count in layout.attributes(SHIPPED).items() if count > MOST_ATTRIBUTES}
    assert [f"{name} has {count} attributes, at most {MOST_ATTRIBUTES}" for name, count in found.items()] == []


def test_attributes_are_counted_own_and_inherited() -> None:
    one = "class One:\n    a: int\n    b = 1\n    __slots__ = ()\n\n    def f(self):\n        self.a = self.c = 1\n        other.d = 1\n"
    two = "class Two(fleet.One):\n    async def g(self):\n        self.e = 1\n\n\nclass Three(Two[int]):\n    pass\n"
    plain = (
        "@dataclass(frozen=True)\nclass Four:\n    a: int\n\n\nclass Five(NamedTuple):\n    a: int\n\n\nclass Six(StrEnum):\n    A = 'a'\n"
    )
    assert layout.attributes({"fleet/a.py": one, "fleet/b.py": two, "fleet/c.py": plain}) == {"One": 3, "Two": 4, "Three": 4}
