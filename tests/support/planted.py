"""Small training scripts in each of which one thing is not deterministic: what ``fleet doctor --determinism`` must find, by name."""

from __future__ import annotations

from dataclasses import dataclass

SCRIPT = '''\
"""Learns nothing, on made-up numbers."""

import datetime
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn


class Rows(torch.utils.data.Dataset):
    def __init__(self, run):
        self.run = run
{data}

    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = torch.sin(torch.arange(8.0) * (index + 1))
{item}
        return row


{planted}


class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.odd = {odd}
        self.last = nn.Linear(8, 1)

    def forward(self, x):
{forward}


def train(run):
    torch.manual_seed(run.seed)
    data, model = Rows(run), Net(run)
{build}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = run.track(model=model, optimizer=optimizer)
    for step in run.steps(state, total=4):
        for rows in step.batches(data, batch_size=16):
{body}
            step.backward(model(rows).square().mean())
        step.commit()
'''

ODD = """\
class Odd(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run
{state}

    def forward(self, x):
{body}
"""


@dataclass(frozen=True)
class Planted:
    """A script, the ``place`` and the ``cause`` that must be named, and what brings it out.

    ``operation``: torch's operation that must be named; ``call``: what the script asks for that must be named.
    """

    name: str
    script: str
    place: str
    varied: str
    cause: str
    operation: str = ""
    call: str = ""


def _indented(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.strip("\n").splitlines()) or " " * by + "pass"


def script(
    *, planted: str = "", odd: str = "nn.Tanh()", data: str = "", item: str = "", build: str = "", body: str = "",
    forward: str = "return self.last(self.odd(self.first(x)))",
) -> str:  # fmt: skip
    """A script with this in it; without anything it is clean."""
    return SCRIPT.format(
        planted=planted, odd=odd, data=_indented(data, 8), item=_indented(item, 8), build=_indented(build, 4), body=_indented(body, 12),
        forward=_indented(forward, 8),
    )  # fmt: skip


def module(body: str, state: str = "", before: str = "") -> str:
    """A script whose module ``model.odd`` has this forward."""
    return script(planted=before + "\n\n" + ODD.format(state=_indented(state, 8), body=_indented(body, 8)), odd="Odd(run)")


TERMS = """
terms = [x * factor for factor in (1.0, 3e7, -3e7, 0.3, 2e5, -2e5, 7.0, 1e-3)]
"""
SORTED_BACKWARD = '''
class Scattered(torch.autograd.Function):
    """As a scatter_add whose order of adding up is another each time."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        terms = [gradient * factor for factor in (1.0, 3e7, -3e7, 0.3, 2e5, -2e5)]
        order = list(os.urandom(6))
        total = torch.zeros_like(gradient)
        for _, number in sorted(zip(order, range(6))):
            total = total + terms[number]
        return total
'''
LIBRARY = """
@torch.library.custom_op("planted::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.from_numpy(np.frombuffer(os.urandom(8 * x.numel()), dtype=np.uint64).astype(np.float32) / 2**64).reshape(x.shape)


noisy.register_autograd(lambda ctx, gradient: gradient)
"""
BY_RANK = "self.run.rank"

ALL = [
    Planted("cores that set the parts of a sum", module("""
parts = os.cpu_count()
return x * sum((part.sum() for part in (x * 1e3).reshape(-1).chunk(parts)), torch.zeros(())) + parts * 1e-6
"""), "model.odd", "machine", "machine", call="os.cpu_count()"),
    Planted("threads from the machine", script(build="torch.set_num_threads(os.cpu_count())",
        planted="class Odd(nn.Module):\n    def forward(self, x):\n        return x * (1 + 1e-3 * torch.get_num_threads())", odd="Odd()"),
        "model.odd", "machine", "threads"),
    Planted("python's random, unseeded", module("return x * self.draw.random()", "self.draw = random.Random()"),
        "model.odd", "again", "draw", call="random.Random()"),
    Planted("numpy, unseeded", module("return x + float(self.draw.normal())", "self.draw = np.random.default_rng()"),
        "model.odd", "again", "draw", call="default_rng()"),
    Planted("a generator of torch's own, seeded by chance",
        module("return x + torch.randn(x.shape, generator=self.draw)", "self.draw = torch.Generator()\nself.draw.seed()"),
        "model.odd", "again", "draw", operation="aten::randn"),
    Planted("a generator of torch's own, seeded once", module("return x + torch.randn(x.shape, generator=self.draw)",
        "self.draw = torch.Generator().manual_seed(1)"), "model.odd", "order", "state"),
    Planted("the kernel's entropy", module("return x * (1 + os.urandom(8)[0] + os.urandom(8)[1] / 256 + os.urandom(8)[2] / 65536)"),
        "model.odd", "again", "draw", call="os.urandom()"),
    Planted("dropout past the seeds", module("torch.seed()\nreturn nn.functional.dropout(x, 0.5)"), "model.odd", "again", "draw",
        operation="aten::bernoulli_"),
    Planted("a scattered sum in the backward", module("return Scattered.apply(x)", before=SORTED_BACKWARD), "model.odd", "again", "draw",
        call="os.urandom()"),
    Planted("sums in the order in which threads end", module(TERMS + """
found, lock = [], threading.Lock()
def work(term):
    time.sleep(os.urandom(1)[0] / 20_000)
    with lock:
        found.append(term)
with ThreadPoolExecutor(8) as pool:
    list(pool.map(work, terms))
total = torch.zeros_like(x)
for term in found:
    total = total + term
return total
"""), "model.odd", "again", "draw"),
    Planted("objects in the order of their addresses", module(TERMS + """
class Term:
    def __init__(self, value):
        self.value = value
objects = [Term(term) for term in terms]
order = sorted(range(len(objects)), key=lambda number: id(objects[number]) // 16 % 127)
total = torch.zeros_like(x)
for number in order:
    total = total + objects[number].value
return total
"""), "model.odd", "", ""),
    Planted("a branch on the time", module("return x * (1 + int(time.time() / 86_400) % 3)"),
        "model.odd", "clock", "clock", call="time.time()"),
    Planted("a branch on the date", module("return x * datetime.datetime.now().timetuple().tm_yday"), "model.odd", "clock", "clock",
        call="datetime.now()"),
    Planted("a counter in a module", module("self.calls += 1\nreturn x / self.calls", "self.calls = 0"), "model.odd", "order", "state"),
    Planted("statistics that are no buffer", module("""
self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
return x - self.mean
""", "self.mean = torch.zeros(8)"), "model.odd", "order", "state"),
    Planted("a cache of the first batch", module("""
if self.first is None:
    self.first = x.detach().mean()
return x - self.first
""", "self.first = None"), "model.odd", "order", "state"),
    Planted("a data set that draws", script(data="self.draw = np.random.default_rng()", item="row = row + self.draw.normal()"),
        "Rows", "again", "draw", call="default_rng()"),
    Planted("a data set that draws in order", script(data="self.draw = random.Random(1)", item="row = row + self.draw.random()"),
        "Rows", "order", "state"),
    Planted("files as the folder lists them", script(data="""
self.names = os.listdir(os.path.dirname(__file__))
""", item="row = row + len(self.names[index % len(self.names)])"), "Rows", "machine", "machine", call="os.listdir()"),
    Planted("a custom operation", module("return torch.ops.planted.noisy(x)", before=LIBRARY), "model.odd", "again", "operation",
        operation="planted::noisy"),
    Planted("memory that nobody has written", module("return x + self.bias", "self.bias = torch.empty(8)"),
        "model.odd", "memory", "memory"),
    Planted("a forward that writes to a parameter", module("""
with torch.no_grad():
    self.scale.mul_(0.99)
return x * self.scale
""", "self.scale = nn.Parameter(torch.ones(8))"), "model.odd", "written", "written"),
    Planted("a forward that writes past autograd", module("""
self.scale.data.mul_(0.99)
return x * self.scale
""", "self.scale = nn.Parameter(torch.ones(8))"), "model.odd", "order", "state"),
    Planted("augmentation by the rank", script(item="""
row = row + torch.rand(8, generator=torch.Generator().manual_seed(self.run.rank + index))
"""),
        "Rows", "rank", "rank"),
    Planted("a learning rate by the rank", script(body="optimizer.param_groups[0]['lr'] = 0.1 * (1 + run.rank)"),
        "train", "rank", "rank"),
    Planted("an order of shards that is summed", script(forward="""
x = self.first(x)
self.total = getattr(self, 'total', 0) + x.detach().sum()
return self.last(self.odd(x * self.total))
"""), "model", "order", "state"),
    Planted("precision by the environment", module("""
with torch.autocast("cpu", dtype=torch.bfloat16, enabled=os.environ.get("RANK") == "1"):
    return (x @ self.weight).float()
""", "self.weight = nn.Parameter(torch.randn(8, 8))"), "model.odd", "rank", "rank"),
    Planted("a sort whose ties fall by chance", module("""
keys = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1]) + torch.from_numpy(np.frombuffer(os.urandom(8), np.uint8).copy()) / 512
return x[:, keys.argsort()] * torch.arange(1.0, 9.0)
"""), "model.odd", "again", "draw", call="os.urandom()"),
]  # fmt: skip

BY_HASH = module("""
total = torch.zeros_like(x)
for number, name in enumerate({"a", "b", "c", "d", "e", "f", "g"}):
    total = total + number * ord(name) * x
return total
""")
"""Goes through a set of texts: another order in each process, and the same within one."""

BY_PROCESS = script(item="row = row + torch.rand(8, generator=torch.Generator().manual_seed(os.getpid() + index))")
"""Augments as DataLoader workers often do, by a seed of the process."""


# ---- what is carried from step to step ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Carried:
    """A script, ``what`` it carries along, and the text of the ``line`` that must be named for it; both empty: it carries nothing."""

    name: str
    script: str
    what: str = ""
    line: str = ""


def loop(before: str = "", top: str = "", body: str = "", factor: str = "1.0", behind: str = "", tracked: str = "") -> str:
    """A script whose loss has this ``factor``."""
    return f'''\
"""Learns nothing, on made-up numbers."""

import functools
import itertools

import torch
from torch import nn

{top.strip()}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.sin(torch.arange(8.0) * (index + 1))


def train(run):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
{_indented(before, 4)}
    state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1){tracked})
    for step in run.steps(state, total=4):
        for rows in step.batches(Rows(), batch_size=16):
{_indented(body, 12)}
            step.backward(model(rows).square().mean() * {factor})
{_indented(behind, 8)}
        step.commit()
'''


COUNTER = """
class Counter:
    def __init__(self):
        self.count = 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def more(self):
        self.count += 1
"""
CARRIED = [
    Carried("a hidden state in a dict", loop(
        before="hidden = {}",
        body="rows = rows + hidden.get(step.shard, 0.0)\nhidden[step.shard] = rows.detach().tanh()",
    ), "hidden in train", "hidden = {}"),
    Carried("a hidden state in a variable", loop(
        before="h = None",
        body="rows = rows if h is None else rows + h",
        behind="h = torch.full((8,), float(step.number + 1))",
    ), "h in train", "h = None"),
    Carried("a closure", loop(
        top="""
def counting():
    count = 1
    def more():
        nonlocal count
        count += 1
    def factor():
        return count
    return more, factor

more, factor = counting()
""", factor="factor()", behind="step.on_commit(more)",
    ), "count in the closure of factor", "def factor():"),
    Carried("an attribute of a module", loop(
        top="""
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 1

    def forward(self, x):
        return x * self.calls

    def more(self):
        self.calls += 1
""", before="model.append(Odd())", behind="step.on_commit(model[3].more)",
    ), "3 of model in train: its calls", "self.calls = 1"),
    Carried("an attribute of a class", loop(
        top="class Seen:\n    steps = 1\n", factor="Seen.steps", behind="step.on_commit(lambda: setattr(Seen, 'steps', Seen.steps + 1))",
    ), "Seen.steps", "    steps = 1"),
    Carried("a global", loop(
        top="STEPS = [1.0]", factor="len(STEPS)", behind="step.on_commit(lambda: STEPS.append(1.0))",
    ), "STEPS of module", "STEPS = [1.0]"),
    Carried("a cache", loop(
        top="NOW = [0]\n\n@functools.lru_cache\ndef factor():\n    return 1.0 + NOW[0]\n",
        body="NOW[0] = step.number", factor="factor()",
    ), "the cache of factor", "@functools.lru_cache"),
    Carried("a default", loop(
        top="def factor(seen=[]):\n    return 1.0 + len(seen)\n",
        factor="factor()", behind="step.on_commit(lambda: factor.__defaults__[0].append(1))",
    ), "a default of factor", "def factor(seen=[]):"),
    Carried("a generator of numbers", loop(
        before="draw = torch.Generator().manual_seed(1)\nfactor = [1.0]", factor="factor[0]",
        behind="factor[0] = float(torch.rand((), generator=draw))",
    ), "draw in train", "draw = torch.Generator().manual_seed(1)"),
    Carried("an iterator", loop(
        before="rates = itertools.count(2)\nrate = 1.0", factor="rate", behind="rate = float(next(rates))",
    ), "rates in train", "rates = itertools.count(2)"),
    Carried("nothing, as it follows from the step", loop(factor="(1.0 + step.number)")),
    Carried("nothing, though a function has a cache", loop(
        top="@functools.lru_cache\ndef squared(number):\n    return float(number**2)\n", factor="squared(step.number + 1)",
    )),
    Carried("nothing, though it counts what it prints", loop(before="seen = []", body="seen.append(step.number)")),
    Carried("an object that is tracked", loop(
        top=COUNTER, before="counter = Counter()", tracked=", counter=counter", factor="counter.count",
        behind="step.on_commit(counter.more)",
    )),
    Carried("a hidden state of each shard", loop(
        top="import fleet", before="hidden = fleet.ShardState(lambda shard: torch.zeros(4, 8))", tracked=", hidden=hidden",
        body="rows = rows + hidden.value\nhidden.value = rows.tanh()",
    )),
]  # fmt: skip
