"""Code blocks of the documents, and what a test has to add to a fragment so that it runs.

A marker is a comment in the line before a block. ``<!-- test: with model -->`` puts the preamble ``model`` before it; with ``in NAME`` the
block goes to a place of the usual loop, see ``PLACES``, or stands in a train function. ``walk: ...``, ``new FILE``, ``into FILE ...`` and
``check`` are for the tests of ``docs/guide.md`` and ``docs/extending.md``. A diff is marked with ``from NAME``: both of its sides are
programs, and find the preamble ``model`` in model.py.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"^(?:<!-- test: (?P<marker>[^\n]*?) -->\n)?(?P<fence>```|~~~)(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S
)

MODEL = """
import torch
from torch import nn

STEPS, PADDING = 4, 0


class Data(torch.utils.data.Dataset):
    def __init__(self, held_out=False):
        self.x = torch.randn(256, 8, generator=torch.Generator().manual_seed(int(held_out)))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum().reshape(1)


def build():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def nt_xent(z):
    flat = nn.functional.normalize(torch.cat([z[:, 0], z[:, 1]]))
    near = (flat @ flat.T / 0.5).masked_fill(torch.eye(len(flat), dtype=torch.bool), -torch.inf)
    return nn.functional.cross_entropy(near, torch.arange(len(flat)).roll(len(z)))


@torch.no_grad()
def validate(model, data):
    return {"val_loss": loss_fn(model.eval(), (data.x, data.x.sum(1, keepdim=True))).item()}


data, held_out = Data(), Data(held_out=True)
"""

LOOP = """
import fleet

def train(run: fleet.Run) -> None:
    model, optimizer = build()
{head of the loop}
    for step in run.steps(state, total=STEPS):
{top of the body}
        for batch in step.batches(data, batch_size=16):
{batch}
{end of the body}
        step.commit()
{tail of the loop}
"""

PLACES = {
    "head of the loop": (4, "state = run.track(model=model, optimizer=optimizer)"),
    "top of the body": (8, ""),
    "batch": (12, "step.backward(loss_fn(model.train(), batch))"),
    "end of the body": (8, ""),
    "tail of the loop": (8, ""),
}
"""Place in LOOP -> its indent, and what stands there where no block takes it."""

TRAIN = "\nimport fleet\n\ndef train(run: fleet.Run) -> None:\n    model, optimizer = build()\n"

PREAMBLES = {
    "model": MODEL,
    "objects": MODEL + "model, optimizer = build()\n",
    "train function": MODEL + TRAIN,
}
INDENT = {"train function": " " * 4}


@dataclass(frozen=True)
class Block:
    """One code block: where it is, what the marker before it says, and its text."""

    page: str
    line: int
    language: str
    marker: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Command lines, continued ones in one piece, without comments and prompts."""
        return command_lines(self.text)

    @property
    def stands_alone(self) -> bool:
        """Whether a test of its page alone knows what is to be done with it."""
        return self.marker == "check" or self.marker.startswith(("walk: ", "new ", "into "))

    @property
    def program(self) -> str:
        """The block with its preamble, as one module. What goes into a bracket of another file is one expression or more."""
        if self.stands_alone:
            text = textwrap.dedent(self.text)
            brackets = "{}" if re.match(r'("[^"\n]*"|\(.*\)): ', text) else "()" if text.rstrip().endswith(",") else ("", "")
            return f"{brackets[0]}\n{text}{brackets[1]}\n"
        if self.language == "diff":
            return self.side("+")
        name = self.marker.removeprefix("with ").removeprefix("in ")
        if not name:
            return self.text
        if name in PLACES:
            return MODEL + _looped(name, self.text)
        return PREAMBLES[name] + textwrap.indent(self.text, INDENT.get(name, ""))

    def side(self, sign: str) -> str:
        """A diff's program before it ("-") or after it ("+")."""
        lines = (line for line in self.text.splitlines() if not line.startswith(("---", "+++", "@@")))
        return "\n".join(line[1:] for line in lines if not line or line[0] in (" ", sign)) + "\n"

    @property
    def trains(self) -> bool:
        """Whether there is a train function to be run."""
        return re.search(r"^def train\(", self.program, re.M) is not None


def _looped(name: str, text: str) -> str:
    """The usual loop, with ``text`` at the place ``name``."""
    program = LOOP
    for place, (indent, usual) in PLACES.items():
        program = program.replace(f"{{{place}}}", textwrap.indent(text if place == name else usual, " " * indent))
    return program


def command_lines(text: str) -> list[str]:
    """See :attr:`Block.commands`."""
    lines = (line.removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks_of(page: str) -> list[Block]:
    """All code blocks of a page, by its path in the project."""
    text = (ROOT / page).read_text()
    return [
        Block(page, text.count("\n", 0, match.start("fence")) + 1, match["language"], match["marker"] or "", match["text"])
        for match in BLOCK.finditer(text)
    ]


def pages() -> list[str]:
    """All documents that users read."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


class Program:
    """A block's train function, which can be handed to another process."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def __call__(self, run: Any) -> None:
        os.chdir(run.options["folder"])
        sys.path.insert(0, run.options["folder"])
        space: dict[str, Any] = {"__name__": "block"}
        exec(compile(self.block.program, str(self.block), "exec"), space)
        space["train"](run)
