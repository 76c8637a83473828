"""Every code block of the documents is of a kind that a test checks: commands are parsed, data is read, programs run (tests/fault)."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from fleet.app.cli.main import app
from fleet.app.cli.run import checked
from fleet.app.configuration import as_toml, configured
from fleet.errors import ConfigError
from tests.support.blocks import PLACES, PREAMBLES, ROOT, Block, blocks_of, pages

ALL = [block for page in pages() for block in blocks_of(page)]
FOLDER = Path()
"""Where the reader is."""
MADE_LATER = {"train.py", "mine/own.py"}
"""Scripts that the reader has, or writes on the way."""


@pytest.fixture(autouse=True)
def made_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reader has written on the way."""
    (tmp_path / "fleet.toml").write_text(as_toml())
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setitem(globals(), "FOLDER", tmp_path)


def check_fleet(words: list[str]) -> None:
    """Parse as the command line would, values and all; nothing is run. Raises what it raises."""
    command: Any = get_command(app)
    if words in (["--help"], ["--version"]):
        assert any(words[0] in parameter.opts for parameter in command.params) or words == ["--help"], words
        return
    if words[0] == "run" and "--resume" not in words and "--repeat" not in words:
        checked(words[1], words[2:], FOLDER)
        words = words[: words.index("--")] if "--" in words else words  # the rest is for the script
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"fleet has no command {' '.join(words)}"
        command, words = command.commands[words[0]], words[1:]
    if "--" in words:
        words, handed_on = words[: words.index("--")], words[words.index("--") + 1 :]
        checked("train.py", handed_on, FOLDER)
    command.make_context(str(command.name), list(words))


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    assert {word for word in words if "=" not in word} <= targets


def check_python(words: list[str]) -> None:
    if words[:1] == ["-m"]:
        module = words[1]
        assert module in ("pip", "venv", "http.server") or (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    elif words[:1] == ["-c"]:
        ast.parse(words[1])
    else:
        assert words[0] in MADE_LATER or (ROOT / words[0]).exists(), words[0]


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"


def check_ray(words: list[str]) -> None:
    """What is handed in is a command of ours."""
    if words[:2] == ["job", "submit"]:
        program, *rest = words[words.index("--") + 1 :]
        assert program == "fleet"
        check_fleet(rest)


def any_words(words: list[str]) -> None:
    """Programs of the system: there is nothing of ours in their words."""


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "fleet": check_fleet, "make": check_make, "python": check_python, "python3": check_python, "pip": check_pip,
    "ray": check_ray,
    **dict.fromkeys(("git", "cd", "source", "kill", "head", "grep", "jq", "less", "export", "cp", "ls", "cat", "curl", "promtool",
                     "docker", "torchrun", "kubectl", "sbatch", "scancel"), any_words),
}  # fmt: skip


def check_plain(block: Block) -> None:
    """A block that names no language: lines of a journal, or commands."""
    check_records(block) if block.text.startswith("[") else check_shell(block)


def check_shell(block: Block) -> None:
    for line in block.commands:
        for part in _parts(shlex.split(line, comments=True)):
            program = Path(part[0]).name
            assert program in PROGRAMS, f"{block}: no rule for the program {program}"
            PROGRAMS[program](part[1:])


def _parts(words: list[str]) -> list[list[str]]:
    """The commands of a pipeline or list."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("|", "&&", ";", "&", ">"):
            parts.append(["cat"] if word == ">" else [])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def check_program(block: Block) -> None:
    if block.stands_alone:
        ast.parse(block.program)
        return
    name = block.marker.removeprefix("with ").removeprefix("in ")
    assert name in ("", *PREAMBLES, *PLACES), f"{block}: there is no preamble {name!r}"
    ast.parse(block.program)


def check_diff(block: Block) -> None:
    """Both sides are Python."""
    for sign in "-+":
        ast.parse(block.side(sign))


def check_records(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


def check_toml(block: Block) -> None:
    content = tomllib.loads(block.text)
    if "version" in content:  # a file of settings
        configured(content)


def nothing_to_run(block: Block) -> None:
    """What a program prints."""


RULES: dict[str, Callable[[Block], object]] = {
    "console": check_shell, "bash": check_shell, "": check_plain, "python": check_program, "diff": check_diff,
    "toml": check_toml, "yaml": lambda block: yaml.safe_load(block.text),
    "json": lambda block: json.loads(block.text), "jsonl": check_records, "text": nothing_to_run,
}  # fmt: skip
"""Language of a block -> its check. A block of another language has no rule, and fails."""


def check(block: Block) -> None:
    assert block.language in RULES, f"{block}: no rule for {block.language!r}"
    RULES[block.language](block)


@pytest.mark.parametrize("block", ALL, ids=str)
def test_every_block_has_a_rule_and_keeps_it(block: Block) -> None:
    check(block)


def test_no_block_is_overlooked() -> None:
    fences = sum(len(re.findall(r"^\s*(?:```|~~~)", (ROOT / page).read_text(), re.M)) for page in pages())
    assert fences == 2 * len(ALL), "a fence that is indented, or not closed"


BAD = {
    "an unknown language": Block("x.md", 1, "ruby", "", "puts 1\n"),
    "an unknown command": Block("x.md", 1, "console", "", "fleet fly\n"),
    "an unknown option": Block("x.md", 1, "", "", "fleet report RUN --colour\n"),
    "a value that is refused": Block("x.md", 1, "", "", "fleet run train.py --chaos mtbf=often\n"),
    "a missing target": Block("x.md", 1, "bash", "", "make coffee\n"),
    "an unknown program": Block("x.md", 1, "bash", "", "sl\n"),
    "a missing preamble": Block("x.md", 1, "python", "with luck", "x = 1\n"),
    "half a program": Block("x.md", 1, "python", "", "for\n"),
    "a diff of no program": Block("x.md", 1, "diff", "", "-for\n+pass\n"),
    "broken toml": Block("x.md", 1, "toml", "", "= 1\n"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_block_is_found(name: str) -> None:
    with pytest.raises((AssertionError, ConfigError, SyntaxError, ValueError, typer.exceptions.TyperException)):
        check(BAD[name])


def test_what_is_documented_is_importable() -> None:
    """The names that pages import from Fleet's own packages."""
    for block in ALL:
        if block.language != "python" or block.page == "docs/extending.md":  # its test has the files that it adds
            continue
        for node in ast.walk(ast.parse(block.program)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("fleet", "storage"):
                module = import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), block
