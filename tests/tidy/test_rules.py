"""Each rule finds what it forbids and passes what it allows: a rule that cannot fail is no rule."""

from __future__ import annotations

import textwrap

import pytest

from tests.tidy import documents, rules


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("fleet/__init__.py", "import ray"),
        ("fleet/data.py", "import torch"),
        ("fleet/testing.py", "from storage.checkpoint import manifest"),
        ("fleet/app/cluster/local.py", "from fleet.app import recipes"),
        ("fleet/app/cluster/local.py", "import actors.coordinator"),
        ("fleet/app/deploy/files.py", "from .. import cli"),
        ("fleet/app/recipes.py", "import torch"),
        ("fleet/app/cli/main.py", "import tests.support"),
        ("fleet/host/clock.py", "import ray"),
        ("fleet/host/follow.py", "from fleet.machine.core import FleetMachine"),
        ("fleet/host/follow.py", "from fleet.app import plans"),
        ("fleet/host/lines.py", "import actors.lines"),
        ("fleet/laws/energy.py", "import torch"),
        ("fleet/planning/plan.py", "from fleet.app.deploy import spec"),
        ("fleet/simulation/world.py", "from fleet.host import clock"),
        ("fleet/machine/core.py", "import torch"),
        ("fleet/machine/core.py", "import numpy as np"),
        ("fleet/machine/core.py", "from policies import recovery"),
        ("fleet/machine/core.py", "def f():\n    from fleet.app import recipes"),
        ("fleet/machine/core.py", "from .. import app"),
        ("fleet/protocol/journal.py", "from fleet.host.clock import Clock"),
        ("policies/recovery.py", "from storage import manifest"),
        ("policies/recovery.py", "import fleet.app.recipes"),
        ("policies/recovery.py", "from fleet.host import clock"),
        ("storage/tier.py", "import ray.train"),
        ("storage/tier.py", "from fleet.app.plans import RunPlan"),
        ("chaos/arrivals.py", "from dashboards import metrics"),
        ("chaos/injector.py", "from fleet.app import launching"),
        ("dashboards/feeds.py", "from fleet.app import plans"),
        ("dashboards/server.py", "from chaos import settings"),
        ("actors/__init__.py", "import ray"),
        ("actors/rank/loop.py", "import ray"),
        ("actors/rank/loop.py", "from actors.coordinator import Coordinator"),
        ("actors/rank/loop.py", "from .. import coordinator"),
        ("actors/plain/crew.py", "import ray"),
        ("actors/coordinator.py", "from fleet.app.machines import machine"),
        ("actors/coordinator.py", "import policies.recovery"),
        ("examples/ray_train/digits_fleet.py", "import fleet.app.launching"),
        ("examples/gpt.py", "import ray"),
        ("stray.py", "import os"),
    ],
)
def test_forbidden_imports_are_found(path: str, line: str) -> None:
    assert rules.import_faults(path, line)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("fleet/__init__.py", "from fleet.app.launching import launch\nfrom actors.rank.loop import Run"),
        ("fleet/__main__.py", "from fleet.host.packages import check_not_shadowed\nfrom fleet.app.cli.main import main"),
        ("fleet/app/cluster/local.py", "import ray\nfrom fleet.app.cluster import quiet\nfrom fleet.host import processes"),
        ("fleet/app/deploy/files.py", "import jinja2, yaml\nfrom fleet.app.deploy.spec import Spec"),
        ("fleet/app/recipes.py", "import ray, actors.coordinator, storage, policies.recovery"),
        ("fleet/app/cli/main.py", "import typer, dashboards.server\nfrom fleet.app.cluster import queue"),
        ("fleet/host/follow.py", "from fleet.ledger.goodput import Ledger\nfrom fleet.host.clock import unix_time_s\nimport fcntl"),
        ("fleet/machine/core.py", "from fleet.protocol.types import View\nimport json"),
        ("fleet/laws/energy.py", "import numpy, scipy.stats"),
        ("policies/recovery.py", "from fleet.ledger import health"),
        ("storage/tier.py", "import torch, fsspec\nfrom fleet.host.journal import sync_directory"),
        ("chaos/live.py", "from fleet.host.clock import Clock"),
        ("dashboards/feeds.py", "import aiohttp\nfrom fleet.host.follow import Follower"),
        ("actors/rank/loop.py", "import torch\nfrom actors.rank import shards"),
        ("actors/plain/crew.py", "from fleet.host import proc\nfrom actors.plain import launcher"),
        ("actors/coordinator.py", "import ray\nfrom actors.driver import Driver"),
        ("examples/ray_train/digits_ray.py", "import ray, torch"),
        ("examples/gpt.py", "import torch, fleet"),
        ("benchmarks/store.py", "import ray, torch, storage, chaos"),
        ("tests/unit/test_a.py", "import ray, torch, fleet.app.recipes, benchmarks.tables"),
    ],
)
def test_allowed_imports_pass(path: str, line: str) -> None:
    assert rules.import_faults(path, line) == []


def test_more_zones_than_anyone_learns_are_refused_and_so_is_one_that_is_nobodys() -> None:
    zones = [rules.Zone(f"fleet/room{number}/", ("fleet",)) for number in range(rules.MOST_ZONES + 1)]
    paths = [f"fleet/room{number}/a.py" for number in range(rules.MOST_ZONES + 1)]
    assert rules.MOST_ZONES == 15
    assert rules.zone_faults(zones, paths) == ["16 zones, at most 15"]
    assert rules.zone_faults(zones[:15], paths) == []
    assert rules.zone_faults(zones[:2], paths[:1]) == ["no file lies in the zone of fleet/room1/"]
    assert len(rules.zone_faults([rules.Zone("fleet/", ("fleet",)), *zones[:2]], paths)) == 2, "the first that fits is a file's own"


@pytest.mark.parametrize(
    "source",
    [
        "from ray.train.v2._internal.execution.worker_group import WorkerGroup",
        "import ray._private.worker",
        "def f():\n    from ray._raylet import Config",
        "import ray\nray._private.state.actors()",
        "ALWAYS = ('ray', 'ray.train.v2._internal.constants')",
    ],
)
def test_use_of_rays_internals_is_found_outside_the_wall(source: str) -> None:
    assert len(rules.ray_faults("actors/shield.py", source)) == 1
    assert rules.ray_faults(rules.RAY_WALL[0], source) == []


def test_what_ray_promises_may_be_used_anywhere() -> None:
    source = "import ray\nfrom ray.train import Result\nfrom ray.train.backend import Backend\nray.get(x)\nray.util.get_node_ip_address()"
    assert rules.ray_faults("actors/shield.py", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.sched_setaffinity(0, {1})",
        "from os import nice\nnice(10)",
        "import ctypes\nctypes.CDLL(None).prctl(1, 9)",
        "from ctypes import CDLL as C\nlibrary = C(None)",
    ],
)
def test_calls_of_the_kernel_are_found_outside_their_module(source: str) -> None:
    assert len(rules.kernel_faults("actors/node.py", source)) == 1
    assert rules.kernel_faults(rules.KERNEL_WALL, source) == []
    assert rules.kernel_faults("actors/node.py", "import os\nos.getpid()\nos.sched_yield()") == []


def test_third_party_names_only_what_others_made() -> None:
    assert rules.third_party("chaos/a.py", "import os, fleet, scipy.stats\nfrom rich.table import Table") == {"scipy", "rich"}


def test_lengths_are_counted_from_the_first_to_the_last_line() -> None:
    source = "def short():\n    return 1\n\n\nasync def long():\n" + "    x = 1\n" * 70
    assert [length for length, _, _ in rules.function_lengths(source)] == [2, 71]
    assert rules.length_faults("a.py", source) == ["a.py:5: long has 71 lines, at most 70"]
    assert rules.length_faults("a.py", "x = 1\n" * 601) == ["a.py: 601 lines, at most 600"]
    assert rules.length_faults("a.py", "x = 1\n" * 600) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "import time as clock\nread = clock.monotonic",
        "from time import sleep\nsleep(1)",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime\ndatetime.now()",
        "import random\nrandom.random()",
        "from random import shuffle\nshuffle([])",
        "import random\nrandom.Random()",
        "import os\nos.urandom(8)",
        "import uuid\nuuid.uuid4()",
        "import numpy as np\nnp.random.rand(3)",
        "import numpy as np\nnp.random.default_rng()",
    ],
)
def test_clocks_and_unseeded_randomness_are_found(source: str) -> None:
    assert len(rules.clock_and_chance_faults("fleet/a.py", source)) == 1


def test_seeded_randomness_passes() -> None:
    source = "import random, time\nimport numpy as np\nrandom.Random(7).random()\nnp.random.default_rng(7).normal()\nx: random.Random"
    assert rules.clock_and_chance_faults("fleet/a.py", source) == []


def test_who_reads_a_clock_is_named() -> None:
    pure = ["fleet/machine/core.py", "fleet/host/journal.py", "fleet/app/report.py"]
    others = ["fleet/host/clock.py", "fleet/app/cluster/local.py", "fleet/app/cli/run.py", "actors/node.py"]
    assert [path for path in (*pure, *others) if rules.is_pure(path)] == pure


@pytest.mark.parametrize(
    "body", ["except OSError:\n    pass", "except OSError:\n    ...", "except:\n    raise", "except OSError:\n    'why'"]
)
def test_handlers_that_hide_errors_are_found(body: str) -> None:
    assert len(rules.handler_faults("a.py", f"try:\n    f()\n{body}")) == 1


def test_handlers_that_act_pass() -> None:
    assert rules.handler_faults("a.py", "try:\n    f()\nexcept OSError as error:\n    log(error)") == []


@pytest.mark.parametrize("source", ["@pytest.mark.skip\ndef f(): ...", "pytest.importorskip('x')", "m = pytest.mark.xfail(reason='r')"])
def test_skips_are_found_unless_listed(source: str) -> None:
    assert len(rules.skip_faults("tests/a.py", source)) == 1
    assert rules.skip_faults("tests/a.py", source, {"tests/a.py": "why"}) == []


def test_missing_docstrings_are_found() -> None:
    source = '"""Module."""\n\n\ndef f(): ...\n\n\ndef _g(): ...\n\n\nclass C:\n    """Said."""\n\n    def m(self): ...\n'
    assert rules.docstring_faults("fleet/a.py", source) == ["fleet/a.py:4: f has no docstring"]
    assert rules.docstring_faults("fleet/a.py", source + "\n\n__all__ = ['C']\n") == []
    assert rules.docstring_faults("fleet/a.py", "x = 1") == ["fleet/a.py: the module has no docstring"]


@pytest.mark.parametrize(
    "source",
    [
        "loss.cause.startswith('evicted: ')",
        "'crash loop' in record.reason",
        "record.reason == 'stopped'",
        "record.cause != ENDED",
        "last_reason in ('a', 'b')",
        "data['reason'].split(': ')",
        "data.get('why') == 'idle'",
        "'no space' in str(error)",
        "error.args[0].removeprefix('x')",
        "re.match('no heartbeat', record.cause)",
        "PATTERN.search(f.reason)",
        "match loss:\n    case Lost(cause='its process ended'): ...",
        "match end:\n    case Ended(reason='a' | 'b'): ...",
        "record.fields['speed 2.1']",
        "decision.fields.get('progress_s')",
    ],
)
def test_what_reads_the_text_of_a_reason_is_found(source: str) -> None:
    assert len(rules.reason_faults("fleet/a.py", source)) == 1


def test_facts_may_be_compared_and_reasons_shown() -> None:
    source = """
        record.why is EndWhy.STOPPED
        record.cause == ProcessEnded()
        record.why == Departure.IDLE
        reason != last_reason
        reason == ""
        " ".join(reason.split())
        print(f"{record.cause}")
        match loss:
            case Lost(cause=ProcessEnded(status=status)): ...
            case Lost(cause=why): ...
        dataclasses.fields(self)
    """
    assert rules.reason_faults("fleet/a.py", textwrap.dedent(source)) == []


def test_machine_paths_are_found() -> None:
    there, home = "/" + "work", "/" + "root"
    for text in (f"see {there}/main", f"'{home}/.cache'", f"cd {there}", f"{home}"):
        assert rules.machine_path_faults("a.md", text), text
    assert rules.machine_path_faults("a.md", f"s3://bucket{there}/x docs{there} net{there}load {there}loads") == []


def test_dead_links_are_found() -> None:
    text = "[a](gone.md) [b](here.md) [c](here.md#no) [d](#yes) [e](https://x.org/gone)\n\n```\n[f](sample.md)\n```\n"
    found = documents.link_faults("README.md", text, lambda target: target == "here.md", lambda _, anchor: anchor == "yes")
    assert found == ["README.md: links to gone.md, which is not there", "README.md: links to the heading here.md#no, which is not there"]
    assert documents.anchors("# The one idea\n\n## `make` it, *now*\n") == {"the-one-idea", "make-it-now"}


def test_paths_that_are_not_there_are_found() -> None:
    text = "`fleet/gone.py` and `fleet/here.py`; fleet/prose.py is no code.\n\n```bash\npython examples/gone.py \\\n  docs/gone.md\n```\n"
    found = documents.path_faults("README.md", text, lambda name: name == "fleet/here.py")
    assert [fault.split()[2].rstrip(",") for fault in found] == ["docs/gone.md", "examples/gone.py", "fleet/gone.py"]


def test_commands_that_do_not_exist_are_found() -> None:
    block = "$ make PYTHON=python3.12 coffee && .venv/bin/fleet run a.py --world 4 \\\n  --wrong\nfleet fly"
    text = f"`make test`, `make tea`; make sense.\n\n```bash\n{block}\n```\n"
    assert documents.make_faults("R", text, "test: lint\n") == ["R: `make coffee` is no target", "R: `make tea` is no target"]
    assert documents.command_faults("R", text, {"run": {"--world"}}) == ["R: `fleet run` has no --wrong", "R: `fleet fly` is no command"]
    handed_on = "`fleet hand s.py --now -- --world 2 --wrong`"
    assert documents.command_faults("R", handed_on, {"run": {"--world"}, "hand": {"--now"}}) == ["R: `fleet run` has no --wrong"]


def test_benchmarks_that_do_not_exist_are_found() -> None:
    assert documents.benchmark_faults("R", "`python -m benchmarks.tea --quick`", lambda _: False) == ["R: no module benchmarks.tea"]


@pytest.mark.parametrize(
    "line",
    [
        "def tell_copies(): pass", "class Teller: pass", "class Lent: pass", "def f(seats): pass", "self.parked_s = 1.0", "told = 1",
        "let_go = 1", "import struck_out as struck", "def _letGo(): pass", "class LineageBegun: pass",
    ],
)  # fmt: skip
def test_identifiers_of_old_words_are_found(line: str) -> None:
    assert len(rules.old_word_faults("fleet/a.py", line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "def tell(self): pass",
        "class Lineage: pass",
        "print(file.tell())",
        "def test_a_word_is_told(): pass",
        "due_s = 1",
        "let = go = 1",
        "parking_lot",
    ],
)
def test_other_identifiers_pass(line: str) -> None:
    assert rules.old_word_faults("fleet/a.py", line) == []


def test_public_classes_that_stand_in_two_places_are_found() -> None:
    sources = {
        "fleet/a.py": "class One: pass\nclass _Own: pass",
        "fleet/b.py": "class _Own: pass\nclass One: pass\nclass Two:\n    class Part: pass",
        "fleet/c.py": "class Three:\n    class Part: pass\nclass Four:\n    class Own: pass\nclass Five:\n    class Own: pass",
    }
    assert [fault.rpartition(": ")[0] for fault in rules.twice_defined(sources)] == [
        "One: fleet/a.py:1, fleet/b.py:2",
        "Own: fleet/c.py:4, fleet/c.py:6",
        "Part: fleet/b.py:4, fleet/c.py:2",
    ]
