"""One table of faults: it is complete, and what is derived from it is the table's."""

from __future__ import annotations

import ast
import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from actors.rank import rank_injector
from chaos import daemons, links, nodes, processes
from chaos.catalogue import load_catalogue
from chaos.controls import ChaosControls, place_name
from chaos.settings import STORM, parse_chaos
from dashboards.openapi import openapi
from fleet.errors import ConfigError
from fleet.ledger.forecast import FaultImpact, RecoveryTimes, Terms, fault_cost
from fleet.ledger.happenings import operation as summary
from fleet.protocol import fault_kinds
from fleet.protocol.codec import Codec
from fleet.protocol.fault_kinds import EXECUTABLE, KINDS, TABLE, Cost, FaultKind, Heal, Performer, drawn, kind_of
from fleet.protocol.fault_parameters import PARAMETERS
from fleet.protocol.operations import ANNOUNCE, HEAL, START, WITHDRAW, Acts, Operation, operation, perform
from fleet.protocol.types import Fault, Member, Process
from fleet.settings.run import RunSettings
from fleet.simulation.plan import Trouble

ROOT = Path(__file__).parents[2]
ACTS: dict[Performer, Acts] = {
    Performer.AGENT: processes.ACTS, Performer.LINKS: links.ACTS, Performer.PROCESS: rank_injector.ACTS, Performer.LAUNCHER: nodes.ACTS,
    Performer.HOST: daemons.AGENT_ACTS, Performer.COORDINATOR: daemons.COORDINATOR_ACTS,
    Performer.CONFINED: daemons.CONFINE_ACTS,
}  # fmt: skip
TERMS = Terms.of(RunSettings(world=4, nodes=2))


def fault(kind: FaultKind, name: str = "f") -> Fault:
    return Fault(name, 1.0, "test", kind.name, **place(kind), duration_s=3.0, severity=2.0)


def place(kind: FaultKind) -> dict[str, int]:
    return {name: 1} if (name := place_name(kind.name)) else {}


# ---- the table ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.name)
def test_a_row_is_complete(kind: FaultKind) -> None:
    assert kind.sentence.endswith(".") and kind.blast_radius and kind.targets
    assert (kind.performer is None) == bool(kind.why_not), "an operation, or the reason why there is none"
    assert (kind.performer is None) == (kind.survived is None)
    assert bool(kind.may_cost) == (kind.performer is not None)
    assert all(KINDS[name].performer is kind.performer for name in kind.shows_as)
    assert {parameter.name for parameter in kind.parameters} <= {parameter.name for parameter in PARAMETERS}


def test_names_are_unique_and_each_component_has_one_kind() -> None:
    assert len(KINDS) == len(TABLE)
    components = [component for kind in TABLE for component in kind.components]
    assert sorted(components) == sorted(component.name for component in load_catalogue().components)


@pytest.mark.parametrize("performer", Performer)
def test_each_performer_does_what_the_table_says_and_nothing_else(performer: Performer) -> None:
    own = [kind for kind in TABLE if kind.performer is performer and not kind.shows_as]
    if performer is Performer.PROCESS:  # it also does the second half of what its agent begins
        own += [kind for kind in TABLE if kind.performer is Performer.CONFINED]
    healed = [kind for kind in own if kind.heal in (Heal.AFTER, Heal.ITSELF, Heal.REPAIR)]
    summary = {(kind.name, phase) for kind in own if kind.announced for phase in (ANNOUNCE, WITHDRAW)}
    assert set(ACTS[performer]) == {(kind.name, START) for kind in own} | {(kind.name, HEAL) for kind in healed} | summary


def test_what_nobody_does_is_refused_with_its_name() -> None:
    order = Operation("f", "lemon_node", START, node=3)
    assert perform(nodes.ACTS, None, order) == "start of lemon_node: no process does that to node 3 here"
    other = Operation("f", "flip_weight", START, Process("n1", 7, 1))
    assert processes.LocalProcesses("n1").operate(other) == "start of flip_weight: no process does that to process 7 of node n1 here"


def test_an_operation_travels_as_it_is() -> None:
    codec, process = Codec([Operation]), Process("n1", 7, 1)
    for order in (operation(fault(KINDS["slow"]), START, process=process), operation(fault(KINDS["lose_node"]), HEAL, node=2)):
        assert codec.decode(codec.encode(order)) == order
    assert operation(fault(KINDS["slow"]), START).seed == operation(fault(KINDS["slow"]), HEAL).seed


def test_what_a_fault_shows_as_is_drawn_by_its_name() -> None:
    names = {drawn(fault(KINDS["silent_corruption"], name)).name for name in "abcd"}
    assert names == set(KINDS["silent_corruption"].shows_as)
    assert {drawn(fault(kind)).name for kind in TABLE if not kind.shows_as} == {kind.name for kind in TABLE if not kind.shows_as}


def test_a_kind_of_another_version_promises_nothing() -> None:
    meteor = kind_of("meteor")
    assert (meteor.performer, meteor.takes_ranks, meteor.lasts) == (None, False, False)
    assert summary(Fault("m", 1.0, "sky", "meteor", 1), (Member(1, 0),)) == "meteor in rank 1 (sky)"


# ---- what is derived ---------------------------------------------------------------------------------------------------------------------


def test_the_api_takes_what_the_table_has() -> None:
    body = openapi()["paths"]["/api/runs/{run}/chaos"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert body["kind"]["enum"] == list(EXECUTABLE)
    assert {parameter.name: parameter.most for parameter in PARAMETERS} == {
        parameter.name: body[parameter.name]["maximum"] for parameter in PARAMETERS
    }


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.name)
def test_an_order_is_taken_when_somebody_can_carry_it_out(kind: FaultKind) -> None:
    controls = ChaosControls(slots=3, nodes=2, planned=False)
    if kind.performer is None:
        with pytest.raises(ConfigError, match="no fault that chaos can carry out"):
            controls.inject(kind.name, **place(kind))
    else:
        controls.inject(kind.name, **place(kind))
        assert controls.waiting


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_bounds_hold_by_hand(parameter: fault_kinds.Parameter) -> None:
    controls = ChaosControls(slots=3, nodes=2, planned=False)
    low = parameter.least if parameter.least is not None else parameter.above
    assert low is not None
    for value in (low - 1.0, parameter.most + 1.0, float("nan")):
        with pytest.raises(ConfigError, match=re.escape(f"{parameter.most:g}")):
            controls.inject("slow", slot=1, amounts={parameter.name: value})
    controls.inject("slow", slot=1, amounts={parameter.name: parameter.most})


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.name)
def test_the_forecast_and_the_story_know_it(kind: FaultKind) -> None:
    lost = TERMS.ranks_lost(kind)
    cost = fault_cost(FaultImpact(kind=kind.name, lost=lost, in_view=lost), TERMS, RecoveryTimes.of(None))
    assert (cost.lost_s > 0) == (cost.charged_s > 0) == kind.takes_ranks, "what only makes steps longer is in kept steps"
    assert bool(TERMS.noticed_s(kind)) == (Cost.STILL in kind.may_cost or Cost.APART in kind.may_cost)
    words = summary(fault(kind), (Member(1, 0),))
    assert "{" not in words and words.endswith("(test)")


def test_the_storm_is_made_of_kinds() -> None:
    assert parse_chaos("storm") == parse_chaos(STORM)
    assert parse_chaos("storm").kinds == tuple(kind.name for kind in TABLE if kind.in_storm)


def test_the_simulator_has_the_troubles_that_stand_for_kinds() -> None:
    known = re.sub(r"\s+", " ", Trouble.__doc__ or "").partition("Args:")[0]
    named = {trouble for kind in TABLE for trouble in kind.simulated}
    assert named and all(re.search(rf"\b{trouble}\b", known) for trouble in named)


def _listed(source: str) -> list[set[str]]:
    """Kinds that stand together in one literal."""
    found = []
    for node in ast.walk(ast.parse(source)):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
        found.append({item.value for item in items if isinstance(item, ast.Constant) and item.value in KINDS})
    return [names for names in found if len(names) > 1]


def test_no_other_module_lists_kinds() -> None:
    assert _listed("a = ('hang', 'slow')") and _listed("{'hang': 1, 'slow': 2}") and not _listed("('hang', START, 'hang')")
    shipped = [path for package in ("fleet", "actors", "chaos", "dashboards", "policies") for path in (ROOT / package).rglob("*.py")]
    copies = {str(path.relative_to(ROOT)) for path in shipped if _listed(path.read_text())}
    assert copies == NAMESAKES


NAMESAKES = {"fleet/simulation/plan.py", "fleet/simulation/outages.py", "chaos/catalogue.py"}
"""Here the same words name troubles of the simulator, and components of the catalogue."""


# ---- a new kind is a row and an act ------------------------------------------------------------------------------------------------------


KINDS_BEGIN = "# The kinds, in the order of the docs.\n"
ROW = f"""{KINDS_BEGIN}
[[kinds]]
name = "ask_rank_to_go"
sentence = "SIGTERM to the process of a rank."
performer = "AGENT"
may_cost = ["DEATH"]
blast_radius = "the rank"
survived = "RANKS_LEFT"
summary = "SIGTERM to {{ranks}}"
ends = "asked to go (SIGTERM)"
"""
ACT = """ACTS: Acts = {
    ("ask_rank_to_go", START): lambda processes, order: processes._signal(order.process, signal.SIGTERM),
"""
PROOF = """
import subprocess, sys
from chaos.injector import ChaosView, Injector, Occupant
from chaos.controls import ChaosControls, obey
from chaos.processes import LocalProcesses
from dashboards.metrics.table import METRICS
from dashboards.openapi import ORDER
from fleet.ledger.goodput import Ledger
from fleet.ledger.happenings import operation
from fleet.protocol.types import Member
from tests.support.injected import inject, this_process
from tests.support.ways import kinds_table

name = "ask_rank_to_go"
child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); import time; time.sleep(60)"], stdout=subprocess.PIPE)
child.stdout.readline()
world = ChaosView({s: Occupant(Member(s, 0), this_process(child.pid, "n"), True) for s in (0, 1)}, {0: (0, 1)}, True)
controls, injector = ChaosControls(2, 1, False), Injector([])
controls.inject(name, slot=1)
obey(controls.take(), injector, 1.0, tuple)
[event] = inject(injector, injector.due(1.0, world), 1.0, LocalProcesses("n").operate)
assert (event.phase, child.wait(30)) == ("executed", -15), event
assert operation(event.fault, event.members) == "SIGTERM to rank 1 (by hand)"
assert name in ORDER["properties"]["kind"]["enum"]
assert f"`{name}`" in kinds_table()
"""


def test_a_new_kind_takes_two_files(tmp_path: Path) -> None:
    for package in ("fleet", "actors", "chaos", "dashboards", "policies", "storage", "tests/support"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests/__init__.py").touch()
    for file, old, new in (("fleet/protocol/fault_kinds.toml", KINDS_BEGIN, ROW), ("chaos/processes.py", "ACTS: Acts = {\n", ACT)):
        text = (tmp_path / file).read_text()
        assert text.count(old) == 1
        (tmp_path / file).write_text(text.replace(old, new))
    done = subprocess.run(
        [sys.executable, "-c", PROOF], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_rows_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KINDS["hang"].name = "freeze"  # type: ignore[misc]
