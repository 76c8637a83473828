"""What documents promise: links, paths and commands, as pure functions over their text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from tests.tidy.rules import OURS

FENCE = re.compile(r"^(```|~~~)[^\n]*\n(.*?)^\1", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"(?<!\\)\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s*(\S+)", re.M)
PATH = re.compile(r"(?<![\w./-])(?:{})/[\w./*-]*[\w/*]".format("|".join((*OURS, "docs"))))
START = r"(?:^|[;&|(])[ \t]*(?:\$ )?"
MAKE = re.compile(START + r"make[ \t]+(?:\w+=\S+[ \t]+)*([a-z][\w-]*)", re.M)
FLEET = re.compile(START + r"(?:\S*bin/|python3? -m )?fleet[ \t]+([a-z][\w-]*)([^\n;|&`]*)", re.M)
BENCHMARK = re.compile(r"-m\s+(benchmarks\.[a-z]\w*)")


def code(text: str) -> Iterator[str]:
    """The fenced blocks and code spans of a Markdown text; continued lines are joined."""
    for block in FENCE.finditer(text):
        yield block[2].replace("\\\n", " ")
    yield from (span[1] for span in SPAN.finditer(FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """Heading anchors, as GitHub forms them."""
    headings = re.findall(r"^#+\s+(.+?)\s*#*$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def link_faults(path: str, text: str, exists: Callable[[str], bool], heading: Callable[[str, str], bool]) -> list[str]:
    """Links to files or headings that are not there. ``exists`` and ``heading`` take targets relative to the document."""
    faults = []
    for match in LINK.finditer(FENCE.sub("", text)):
        target, _, anchor = (match[1] or match[2]).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        if target and not exists(target):
            faults.append(f"{path}: links to {target}, which is not there")
        elif anchor and not heading(target, anchor):
            faults.append(f"{path}: links to the heading {target}#{anchor}, which is not there")
    return faults


def path_faults(path: str, text: str, exists: Callable[[str], bool]) -> list[str]:
    """Paths of this project, named in code, that are not there."""
    named = {match[0] for piece in code(text) for match in PATH.finditer(piece)}
    return [f"{path}: names {name}, which is not there" for name in sorted(named) if not exists(name)]


def make_faults(path: str, text: str, makefile: str) -> list[str]:
    """``make X`` in code, where the Makefile has no target X."""
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.M))
    named = {name for piece in code(text) for name in MAKE.findall(piece)}
    return [f"{path}: `make {name}` is no target" for name in sorted(named - targets)]


def command_faults(path: str, text: str, commands: Mapping[str, set[str]]) -> list[str]:
    """``fleet X --option`` in code that the command line does not know. ``commands``: name -> its options; after `` -- `` those of run, and
    after ``fleet run --`` those of a script."""
    faults = []
    for match in (found for piece in code(text) for found in FLEET.finditer(piece)):
        own, _, handed_on = match[2].partition(" -- ")
        if match[1] not in commands:
            faults.append(f"{path}: `fleet {match[1]}` is no command")
            continue
        for name, words in ((match[1], own), ("run", handed_on if match[1] != "run" else "")):
            options = set(re.findall(r"(?<!\S)(--[a-z][\w-]*)", words))
            faults += [f"{path}: `fleet {name}` has no {option}" for option in sorted(options - commands.get(name, set()))]
    return faults


def benchmark_faults(path: str, text: str, exists: Callable[[str], bool]) -> list[str]:
    """``python -m benchmarks.X`` in code, where there is no such module."""
    named = {name for piece in code(text) for name in BENCHMARK.findall(piece)}
    return [f"{path}: no module {name}" for name in sorted(named) if not exists(name.replace(".", "/") + ".py")]
