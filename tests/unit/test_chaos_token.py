from __future__ import annotations

from pathlib import Path

import pytest

from fleet.app import chaos_token
from fleet.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".fleet").mkdir()
    return tmp_path


def test_without_an_operators_token_nobody_has_to_show_one(home: Path) -> None:
    chaos_token.check("", home)
    (home / chaos_token.FILE).write_text("\n")
    chaos_token.check("", home)


def test_who_knows_the_token_may_and_others_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / chaos_token.FILE).write_text("opensesame\n")
    for token, why in ((None, "has none"), ("", "has none"), ("sesame", "has another")):
        monkeypatch.delenv(chaos_token.VARIABLE, raising=False)
        if token is not None:
            monkeypatch.setenv(chaos_token.VARIABLE, token)
        with pytest.raises(ConfigError, match=why):
            chaos_token.check(chaos_token.shown(), home)
    monkeypatch.setenv(chaos_token.VARIABLE, "opensesame")
    assert "opensesame" not in chaos_token.shown()
    chaos_token.check(chaos_token.shown(), home)
