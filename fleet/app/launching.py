"""``fleet.launch``: a run from Python, in this process. It does for a function the same as ``fleet run`` for a script."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import re
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.rank.script import Script
from fleet.app import plans, policy_choice, resuming
from fleet.app.configuration import Configuration, configured, layer_of
from fleet.app.progress_calls import Progress, reporting
from fleet.app.result import Result, Twin, result_of
from fleet.app.shipping import ship
from fleet.app.stopping import StopSignal, stopped_by_signals
from fleet.errors import ConfigError, RunFailed
from fleet.host import packages
from fleet.settings.run import RunSettings

if TYPE_CHECKING:
    from fleet.app.plans import RunPlan, RunResult
    from fleet.app.recipes import LiveRun
    from fleet.app.remote import Launched

_running = threading.Lock()
"""A process is connected to one Ray cluster at a time."""
Layer = Mapping[str, Any] | Path | str


def launch(
    train: Callable[[Any], None],
    *,
    world: int | None = None,
    spares: int | None = None,
    nodes: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    storage: str | None = None,
    address: str | None = None,
    working_dir: str | None = None,
    allow_chaos: bool = False,
    chaos: str | Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    config: Layer | Sequence[Layer] = (),
    name: str = "",
    resume: str = "",
    twin: bool | int = False,
    progress: Callable[[Progress], object] | None = None,
    check: bool = True,
    **settings: Any,
) -> Result:
    """Train with ``train(run)`` on a local cluster, through losses of its ranks; returns when the run is over.

    It works in a script, in a notebook and in a test. ``train`` may be a closure or a lambda: it goes to the ranks by value, with the parts
    of its module that it uses. Ctrl-C is as on the command line: the first ends the run in order, with status ``stopped``, the second at
    once. Outside of the main thread, this function does not get Ctrl-C.

    Args:
        train: is called with a ``fleet.Run`` in each rank.
        world: ranks that train; here and in the next five None stands for the setting's default.
        spares: ranks that stand by.
        nodes: worker nodes of the local cluster.
        steps: optimizer steps of the run; they go before the function's number.
        seed: of model, data and chaos.
        storage: folder or fsspec URL for journals and checkpoints.
        address: of a Ray cluster to join: ``auto`` or ``HOST:PORT``; None: a local cluster of this run's own.
        working_dir: with ``address``: the folder whose modules travel to the nodes, too; None: that of the script; empty: none, and the
            function brings only its own module.
        allow_chaos: with ``address``: faults may strike the run on that cluster.
        chaos: ``off`` (the default), ``storm``, or e.g. ``mtbf=15s,kinds=kill_rank+hang``; or a mapping of its settings.
        options: the train function reads them as ``run.options``; values become text.
        config: files of settings, ``key=value`` texts, or mappings; later over earlier, and arguments over all of them.
        name: of the run; empty: the function's, with the time.
        resume: go on with the run of this name from its newest durable checkpoint, with the settings that it began with.
        twin: run again without faults when the run is completed, and compare the final bits; a number is the twin's world size.
        progress: is called about once a second, in a thread of its own, and once at the end. Its first error is logged.
        check: raise ``RunFailed`` when the run fails.
        settings: any other setting of a run by name, such as ``shards=32`` or ``timeouts={"progress_s": 30}``,
            or ``recovery={"policy": "package.module:Class"}``.

    Raises:
        ConfigError: something is impossible. No rank was started, and nothing is left of the run.
        RunFailed: the run failed, and ``check`` is true. Its ``result`` is the result that would have been returned.
    """
    named: dict[str, Any] = {"world": world, "spares": spares, "nodes": nodes, "steps": steps, "seed": seed, "storage": storage}
    named |= {"chaos": chaos, "options": options}
    given = {key: value for key, value in named.items() if value is not None}
    layers = layers_of({**settings, **given, "config": config})
    _load_ray()
    sent = train if isinstance(train, Script) else ship(train)
    return launched(sent, layers, LaunchRequest(name, resume, address, twin, progress, check, working_dir, allow_chaos))


def _load_ray() -> None:
    """Import Ray without its red warnings in a notebook about missing widgets: Fleet shows none of these."""
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")
        importlib.import_module("ray")


def layers_of(given: Mapping[str, Any]) -> list[Layer]:
    """Settings as :func:`launch` takes them, as layers of a configuration. Raises ConfigError."""
    rest = dict(given)
    config = rest.pop("config", ())
    layers = [config] if isinstance(config, Mapping | Path | str) else list(config)
    named = [layer_of(each, Path()) if isinstance(each, str) else each for each in layers]
    return [*named, rest]


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Arguments of :func:`launch` that are no settings."""

    name: str = ""
    resume: str = ""
    address: str | None = None
    twin: bool | int = False
    progress: Callable[[Progress], object] | None = None
    check: bool = True
    working_dir: str | None = None
    allow_chaos: bool = False


def launched(train: Callable[[Any], None], layers: Sequence[Layer], asked: LaunchRequest) -> Result:
    """:func:`launch` for a train function that can travel to ranks as it is."""
    packages.check_not_shadowed()
    found = configured(*layers)
    plan = plan_of(train, found, asked)
    plans.check_chaos_allowed(asked.address, asked.allow_chaos, plan.chaos.on)
    plans.check_asks(asked.address, plan.settings.ask_for_nodes)
    plans.check_tls(asked.address, plan.settings.tls, plan.resume)
    policy_choice.check(plan.settings)
    twin_world = _twin_world(plan.settings, asked.twin)
    with _alone(asked.address), _joined(plan, asked) if asked.address is not None else _local(plan) as start:
        result, verdict, twin = _run_all(plan, start, twin_world, asked.progress)
    return _judged(plan, result, verdict, twin, check=asked.check)


# ---- the request -------------------------------------------------------------------------------------------------------------------------


def plan_of(train: Callable[[Any], None], found: Configuration, asked: LaunchRequest) -> RunPlan:
    """The run that is asked for. Raises ConfigError."""
    settings, name = found.run, asked.name
    plans.check(settings, found.chaos)
    root = plans.root_of(settings.storage if asked.address is None else RunSettings().storage)
    if asked.resume:
        return _resumed(train, root, found, asked)
    name = plans.checked_name(name, root) if name else plans.new_name(_called(train))
    return plans.RunPlan(name=name, folder=root / name, settings=settings, train=train, chaos=found.chaos)


def _called(train: Callable[[Any], None]) -> str:
    return train.file if isinstance(train, Script) else stem_of(getattr(train, "name", ""))


def stem_of(function: str) -> str:
    """A word for a run's name, from the name of its function."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", function.rpartition(".")[2]).strip("-_") or "run"


def _resumed(train: Callable[[Any], None], root: Path, found: Configuration, asked: LaunchRequest) -> RunPlan:
    settings = found.run
    if asked.name:
        raise ConfigError("name", asked.name, "a run that is resumed has its name", "Leave it out.")
    plans.fetch_journal(settings.storage, asked.resume, root)
    folder = plans.find_run(asked.resume, root, "--resume")
    if plans.is_completed(folder):
        raise ConfigError("resume", asked.resume, f"it is completed: {plans.why_completed(folder)}", "Start a new run.")
    resuming.check_idle(folder)
    resuming.check(folder, found)
    return plans.resumed_plan(folder, plans.Executed(), settings.storage, train)


def _twin_world(settings: RunSettings, twin: bool | int) -> int:
    """World size of the twin, 0 for no twin. Raises ConfigError."""
    if not isinstance(twin, int) or twin < 0:
        raise ConfigError("twin", twin, "it is yes, no, or the world size of the twin", "Use twin=True.")
    if twin is False or twin == 0:
        return 0
    world = settings.world if twin is True else twin
    dataclasses.replace(settings, world=world, max_world=0, spares=0)  # refused now, not after the run
    return world


# ---- the run -----------------------------------------------------------------------------------------------------------------------------

Start = Callable[["RunPlan"], "LiveRun | Launched"]


@contextmanager
def _alone(address: str | None) -> Iterator[None]:
    """Allow one run at a time in a process, and no local cluster while the process is in another cluster. Raises ConfigError."""
    import ray

    if not _running.acquire(blocking=False):
        reason = "this process is busy with another run, and is connected to one cluster at a time"
        raise ConfigError("launch", "called twice", reason, "Wait for the other run, or use another process.")
    try:
        if ray.is_initialized() and address is None:
            reason = "this process is connected to it, and the run would have a local cluster of its own"
            way_out = 'Give address="auto" to train there; or call ray.shutdown() first.'
            raise ConfigError("ray", ray.get_runtime_context().gcs_address, reason, way_out)
        yield
    finally:
        _running.release()


@contextmanager
def _local(plan: RunPlan) -> Iterator[Start]:
    """A local cluster for the run, and its twin."""
    from dashboards.trackers import choice
    from fleet.app import recipes
    from fleet.app.cluster import ray_internals
    from storage.backends.trial import StoreTrial, check_folder

    choice.check(plan.settings.track, os.environ)
    check_folder(plan.folder if plan.resume else plan.folder.parent)
    tried = StoreTrial(plans.store_url(plan)) if "://" in plan.settings.storage else None  # beside the cluster's start
    with ray_internals.prints_kept(), recipes.local_cluster(plan.settings, imports_from=own_folders()) as cluster:
        if tried is not None:
            tried.check("this machine")
        yield lambda each: recipes.LiveRun(each, cluster)


@contextmanager
def _joined(plan: RunPlan, asked: LaunchRequest) -> Iterator[Start]:
    """The cluster at the address that is asked for: the run belongs to it."""
    from fleet.app import remote

    assert asked.address is not None
    own = Path(plan.train.folder) if isinstance(plan.train, Script) else script_folder()
    code = own if asked.working_dir is None else Path(asked.working_dir).resolve() if asked.working_dir else None
    if code is not None and not code.is_dir():
        raise ConfigError("working_dir", asked.working_dir, "is no folder", "Name the folder of the modules that the function needs.")
    with remote.connected(asked.address):
        yield lambda each: remote.Launched(each, plan.folder.parent, code)


def _run_all(
    plan: RunPlan, start: Start, twin_world: int, progress: Callable[[Progress], object] | None
) -> tuple[RunResult, dict[str, Any] | None, RunPlan | None]:
    """(the run's result, the twin's verdict, the twin's plan)."""
    result, stopped_by = _one(plan, start, progress)
    if not twin_world:
        return result, None, None
    if stopped_by or not result.completed:
        return result, plans.without_twin(result, stopped_by, twin_world), None
    twin = plans.twin_of(plan, twin_world)
    return result, plans.compare(plan, twin, _one(twin, start, None)[0]), twin


def _one(plan: RunPlan, start: Start, progress: Callable[[Progress], object] | None) -> tuple[RunResult, str]:
    """(how the run ended, the signal that came to stop this process; empty: none). It may come when the run has just ended."""
    from fleet.app import tracking

    live, noted = start(plan), StopSignal()
    with reporting(plan.journal, progress), stopped_by_signals(noted.stopping(live.stop), lambda words: print(words, file=sys.stderr)):
        result = live.execute()
    for line in tracking.in_words(plan.folder, plan.settings.track):
        print(line, file=sys.stderr)
    return result, noted.by


def _judged(plan: RunPlan, ended: RunResult, verdict: dict[str, Any] | None, twin: RunPlan | None, *, check: bool) -> Result:
    beside = None
    if verdict is not None and twin is not None:
        beside = Twin(verdict=verdict["verdict"], world=verdict["world"], result=result_of(twin.folder, plans.store_url(twin)))
    if not plan.journal.exists():  # it was deleted while the run went on, so there is no report
        raise RunFailed(f"run {plan.name} failed: {ended.reason}", ended.detail)
    result = result_of(plan.folder, plans.store_url(plan), verdict, beside)
    if ended.status == "failed" and check:
        error = RunFailed(f"run {plan.name} failed: {ended.reason}", ended.detail)
        error.result = result
        raise error
    return result


def script_folder() -> Path | None:
    """Where this process's script lies; None in a notebook, at a prompt, and where the script is an installed program."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(script).resolve().parent if script else None
    return None if folder is None or str(folder).startswith((sys.prefix, sys.base_prefix, sys.exec_prefix)) else folder


def own_folders() -> list[str]:
    """Where this process finds modules that are not installed: ranks find them there, too."""
    library = Path(sysconfig.get_path("stdlib"))
    folders = dict.fromkeys(Path(entry or ".").resolve() for entry in sys.path)
    installed = {"site-packages", "dist-packages"}
    return [str(each) for each in folders if each.is_dir() and not each.is_relative_to(library) and installed.isdisjoint(each.parts)]
