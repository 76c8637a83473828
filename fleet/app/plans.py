"""A run before anything runs: its plan, its name and its place; and the comparison of two runs. Light: neither Ray nor torch."""

from __future__ import annotations

import dataclasses
import difflib
import json
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.rank import script_loading
from actors.rank.script import Script
from chaos.settings import ChaosSettings
from fleet.app import policy_choice, twins
from fleet.app.policy_choice import completed
from fleet.errors import ConfigError, RunFailed
from fleet.host import tls
from fleet.host.follow import last_words
from fleet.host.journal import read_journal
from fleet.host.provenance import PATCH, Code, code_of, provenance
from fleet.ledger.lineage import DataHistory
from fleet.protocol.decisions import GoneBack
from fleet.protocol.draws import in_texts
from fleet.protocol.holding import SeenClaim
from fleet.protocol.records import COMPLETED, PLAIN, RUN_NAME, STOPPED, UNSAVED, RunBuilt, RunEnded, RunStarted, configuration
from fleet.protocol.types import Build
from fleet.settings.fields import read
from fleet.settings.run import RunSettings
from fleet.settings.track import TrackSettings
from storage.backends.urls import without_credentials


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One run to be made: its train function, its settings, its faults, and the folder of its journal.

    Attributes:
        origin: URL, with the id, of another run's checkpoint from which this one goes on; empty: it begins anew. ``build``: how the
            other run was built, as far as its journal says so.
        twin_since_s: of a twin, when the run began that it repeats, in Unix time; None: it is no twin.
        chaos_token: its user's token for chaos on a joined cluster, see ``fleet.app.chaos_token``.
        made_of: the run's provenance, where the script lies on another machine than its driver; None: it is found out here.
        back: the checkpoint that a resumed run goes back to, and the samples that it leaves out from there; None: it does not go back.
        page: address of the run's live page; empty: there is none.
        seen: the claim that this run's claim may follow, of a run that others may hold; None: it is found out when the run is taken.
        plain: the arguments of a script that is run as it is, without Fleet's loop; None: it is a script of Fleet's.
    """

    name: str
    folder: Path
    settings: RunSettings
    train: Callable[[Any], None]
    script: str = ""
    chaos: ChaosSettings = field(default_factory=ChaosSettings)
    resume: bool = False
    queued_s: float = 0.0
    origin: str = ""
    build: Build | None = None
    twin_since_s: float | None = None
    made_of: Mapping[str, Any] | None = None
    chaos_token: str = ""
    back: GoneBack | None = None
    page: str = ""
    seen: SeenClaim | None = None
    plain: tuple[str, ...] | None = None

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"


ARGUMENTS, MODULE = "arguments", "module"
"""Keys of a run's record: the arguments that its script finds in ``sys.argv``, and the script's name, where it was named as a module."""
TWIN = "twin"
"""Folder of a run's twin, in its own."""
CODE = {"script_sha256": "the script", "commit": "the commit", "diff_sha256": "what differs from the commit"}


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences of a run that is repeated now from its record: in its ``code``, and ``around`` it. A clause each."""

    code: tuple[str, ...]
    around: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    plan: RunPlan
    status: str
    reason: str
    detail: str

    @property
    def completed(self) -> bool:
        """Whether the run has come to its end: all steps are committed, or its loop has ended it."""
        return self.status in (COMPLETED, UNSAVED)


def root_of(storage: str) -> Path:
    """The folder of the runs; of runs in a store, it holds the journals."""
    return Path(RunSettings().storage if "://" in storage else storage).resolve()


def new_name(script: str) -> str:
    """A new name for a run of ``script``: the script's name, the time, and four random digits."""
    return f"{Path(script).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def checked_name(name: str, root: Path) -> str:
    """The user's name for a run. Raises ConfigError when it is no name of a folder, or a run under ``root`` has it."""
    if not RUN_NAME.fullmatch(name):
        raise ConfigError("--name", name[:80], "not a name: letters, digits and . _ + -, at most 200, a letter or a digit first")
    if (root / name).exists():
        raise ConfigError("--name", name, f"{root / name} is there already", "Choose another, or use fleet run --resume.")
    return name


def check_chaos_allowed(address: str | None, allowed: bool, on: bool = True) -> None:
    """Raises ConfigError when chaos is ``on`` for a run on a joined cluster, and its user has not allowed it."""
    if on and address and not allowed:
        reason = "the cluster was there before, and may be used by others"
        raise ConfigError("--chaos", "on", reason, "Add --allow-chaos (Python: allow_chaos=True): faults strike this run alone.")


def check_asks(address: str | None, asks: bool) -> None:
    """Raises ConfigError when a local cluster is asked for nodes: only a joined cluster has an autoscaler."""
    if asks and not address:
        raise ConfigError(
            "ask_for_nodes", True, "a local cluster has the nodes that it was started with", "Give --address, or leave it out."
        )


def fetch_journal(storage: str, name: str, root: Path) -> None:
    """Fetch the journal of a run from its store, if it lies in one."""
    if "://" in storage:
        from storage import mirror

        mirror.fetch_journal(url_of(storage, name, root), root / name / "journal.jsonl")


def store_url(plan: RunPlan) -> str:
    """Where the run's checkpoints lie: beside the journal, or in the store of its settings."""
    return url_of(plan.settings.storage, plan.name, plan.folder)


def stored_at(folder: Path) -> str:
    """Where the checkpoints of the run in ``folder`` lie, from its journal."""
    run, content = recorded(folder)
    return url_of(str(content["settings"]["storage"]), run, folder)


def place_of(plan: RunPlan, address: str) -> str:
    """Where the checkpoints of a run really lie, which goes on at the cluster at ``address``; empty: in a folder of its head alone."""
    storage = plan.settings.storage
    if not address or "://" in storage:
        return store_url(plan)
    return f"file://{Path(storage) / plan.name}" if Path(storage).is_absolute() else ""


def url_of(storage: str, run: str, folder: Path) -> str:
    """Where the checkpoints of ``run`` lie. ``folder``: of its journal; ``storage``: its setting."""
    return f"{storage.rstrip('/')}/{run}" if "://" in storage else f"file://{folder.resolve()}"


def describe(plan: RunPlan, code: Code | None = None) -> str:
    """The plan and the run's provenance as JSON text. :func:`resumed_plan` and :func:`repeated_plan` make the plan again from it.

    Credentials in the storage's URL are left out. ``code`` is that of the script, if it was read already.
    """
    settings = dataclasses.asdict(completed(plan.settings)) | {"storage": without_credentials(plan.settings.storage)}
    rates = plan.chaos.rates_per_s(world=plan.settings.world, nodes=plan.settings.nodes)
    made_of = plan.made_of if plan.made_of is not None else provenance(plan.script, code)
    content = {"script": plan.script, "settings": settings, "chaos": dataclasses.asdict(plan.chaos), "made_of": made_of}
    rest = {"queued_s": plan.queued_s, "origin": plan.origin}
    said = {} if plan.plain is None else {PLAIN: list(plan.plain)}
    return json.dumps(
        content | _executed(plan.train) | {"fault_rates": rates} | said | {name: value for name, value in rest.items() if value}
    )


def _executed(train: Callable[[Any], None]) -> dict[str, Any]:
    """The facts of a script that :func:`_loaded` needs beside its file."""
    if not isinstance(train, Script):
        return {}
    return ({ARGUMENTS: list(train.arguments)} if train.arguments else {}) | ({MODULE: train.name} if train.is_module else {})


def check(settings: RunSettings, chaos: ChaosSettings) -> None:
    """Raises ConfigError for settings that are impossible together."""
    policy_choice.check(settings, imported=False)
    _check_copies(settings)
    chaos.plan(seed=settings.seed, world=settings.slots, nodes=settings.nodes)
    for axis, place in chaos.aim:
        if place >= settings.mesh.get(axis, 0):
            axes = ", ".join(f"{name}={size}" for name, size in settings.mesh.items()) or "there is none"
            raise ConfigError("chaos.coordinate", f"{axis}:{place}", "no rank of the run is there", f"Look at the mesh: {axes}.")
    in_memory, interval_s = settings.nodes > 1 and settings.peer_copies > 0, settings.checkpoint.interval_s
    if chaos.lose_all and not in_memory and interval_s is not None and interval_s >= chaos.duration_s:
        reason = f"no node keeps copies in its memory, and the first durable checkpoint comes after {interval_s:g} s, when chaos is over"
        raise ConfigError("chaos.lose_all", "yes", reason, "Use two nodes with --config peer_copies=1, or a shorter --checkpoint interval.")


def check_tls(address: str | None, directory: str, resume: bool) -> None:
    """Raises ConfigError: this host is not as ``tls`` wants it, or nothing would leave it. A shell may be on none of the run's hosts."""
    if directory and address is None and not resume:
        reason = "a cluster that Fleet starts is on this machine, and none of its connections leaves it"
        raise ConfigError("tls", directory, reason, "Leave it out, or join a cluster with --address.")
    if directory and (not Path(directory).is_absolute() or Path(directory).exists()):
        tls.identity(directory)


def _check_copies(settings: RunSettings) -> None:
    """Raises ConfigError for more copies than there are other ranks. One copy, the default, is allowed in a world of one rank, too."""
    copies, others = settings.optimizer_copies, settings.most - 1
    if settings.spread and copies > max(1, others):
        reason = f"a part is kept by its owner and by so many other ranks, and a world of {settings.most} has {others} others"
        way_out = f"Use --config optimizer_copies={max(1, others)} or fewer, or a --world of {copies + 1} or more."
        raise ConfigError("optimizer_copies", copies, reason, way_out)


def is_completed(folder: Path) -> bool:
    """Whether the run in ``folder`` has come to its end, by its last step or by its loop, and has saved its last state."""
    ended = last_words(folder / "journal.jsonl")[1]
    return ended is not None and ended.status == COMPLETED


def why_completed(folder: Path) -> str:
    """Why a completed run has ended, from its journal."""
    ended = last_words(folder / "journal.jsonl")[1]
    return ended.reason if ended is not None else ""


@dataclass(frozen=True, slots=True)
class Executed:
    """The script that ranks execute, as the command line names it: its ``sys.argv``, and whether it is named as a module."""

    script: str = ""
    arguments: tuple[str, ...] = ()
    module: bool = False

    @property
    def path(self) -> str:
        """Where the script lies; empty where none is named. Raises ConfigError: there is no such module."""
        return script_loading.found(self.script, module=True).file if self.module and self.script else self.script


def _again(folder: Path, asked: Executed, storage: str = "", train: Callable[[Any], None] | None = None) -> RunPlan:
    """The plan of the run in ``folder``, from its own journal, but for its faults. Raises ConfigError.

    ``asked`` replaces the script and the arguments that the run was started with. ``train`` is a train function that is in no script.
    ``storage`` is the same place again, perhaps with credentials in its URL, which the journal does not keep.
    """
    run, content = recorded(folder)
    train = train or _loaded(content, asked)
    script = asked.script or script_in(content)
    script = train.file if isinstance(train, Script) and train.is_module else script
    settings = dataclasses.replace(settings_in(content, storage), left_out=left_out_in(folder))
    return RunPlan(name=run, folder=folder, settings=settings, train=train, script=script)


def left_out_in(folder: Path) -> tuple[str, ...]:
    """The samples that steps of the run in ``folder`` leave out now, in the setting's form; see :mod:`fleet.protocol.draws`."""
    return in_texts(DataHistory().apply_all(read_journal(folder / "journal.jsonl", spans=False)).left_out)


def resumed_plan(folder: Path, asked: Executed, storage: str = "", train: Callable[[Any], None] | None = None) -> RunPlan:
    """The plan of a run that stopped; see :func:`_again`. Raises ConfigError."""
    return dataclasses.replace(_again(folder, asked, storage, train), resume=True)


def continued_plan(folder: Path, asked: Executed, name: str, steps: int, storage: str = "") -> RunPlan:
    """A new run that goes on where the completed run in ``folder`` has ended, to ``steps`` steps in all. Raises ConfigError."""
    from storage.checkpoint.parts import newest_checkpoint

    plan = _again(folder, asked, storage)
    url = store_url(plan)
    newest = newest_checkpoint(url, plan.name)
    if newest is None:
        raise ConfigError("--resume", plan.name, f"there is no sound checkpoint in {without_credentials(url)}", "Train it again.")
    if steps <= newest[1].step:
        reason = f"run {plan.name} has {newest[1].step} steps already"
        raise ConfigError("--steps", steps, reason, "Give the number of all steps, old and new.")
    builds = [record.build for record in read_journal(folder / "journal.jsonl", spans=False) if isinstance(record, RunBuilt)]
    name = checked_name(name, folder.parent) if name else new_name(plan.script)
    return dataclasses.replace(
        plan, name=name, folder=folder.parent / name, settings=dataclasses.replace(plan.settings, steps=steps),
        origin=f"{without_credentials(url)}/{newest[0]}", build=builds[-1] if builds else None,
    )  # fmt: skip


def repeated_plan(folder: Path, asked: Executed, root: Path) -> RunPlan:
    """The same run once more, under a new name: its settings, its seed and its chaos, from its journal. Raises ConfigError."""
    plan, content = _again(folder, asked), recorded(folder)[1]
    chaos, name = read(ChaosSettings, content["chaos"], "chaos."), new_name(plan.script)
    return dataclasses.replace(plan, name=name, folder=root / name, chaos=chaos)


def seen_plan(folder: Path) -> RunPlan:
    """The plan of a run that was begun elsewhere, to look at and not to run: its settings and its chaos, from its journal."""
    run, content = recorded(folder)
    chaos = read(ChaosSettings, content["chaos"], "chaos.")
    settings = settings_in(content)
    return RunPlan(name=run, folder=folder, settings=settings, train=elsewhere, script=str(content["script"]), chaos=chaos)


def elsewhere(run: Any) -> None:
    """Stands for a train function that is not here. Raises RunFailed."""
    raise RunFailed("this run is trained elsewhere: its function is not here")


def check_fleets(folder: Path, option: str) -> None:
    """Raises ConfigError when the run in ``folder`` ran a script as it is: Fleet can begin such a run, and cannot continue it."""
    run, content = recorded(folder)
    if PLAIN in content:
        words = _plainly(str(content["script"]), content[PLAIN])
        reason = "it ran a script as it is, whose checkpoints are its own"
        raise ConfigError(option, run, reason, f"Run it again, and it goes on from the checkpoint that it finds: {words}")


def again(plan: RunPlan) -> str:
    """The command that runs the script of a plan with ``plain`` again."""
    return _plainly(plan.script, plan.plain or ())


def _plainly(script: str, arguments: Sequence[str]) -> str:
    return shlex.join(["fleet", "run", "--plain", script, *(["--", *arguments] if arguments else [])])


def changed_since(folder: Path, script: str) -> Changes:
    """Changes since the run in ``folder`` began: of its script or ``script``, its repository, its versions, its machine and its directory.

    Facts that the journal lacks are not compared; nor are untracked files that the run did not have.
    """
    _, content = recorded(folder)
    was = content.get("made_of", {})
    script = script or script_in(content)
    now = provenance(script, code_of(script, was.get("untracked")))
    # without a patch, the digest covers tracked files alone
    compared = [name for name in CODE if name in was and (name != "diff_sha256" or "patch" in was)]
    versions = {**was.get("versions", {}), **now["versions"]} if "versions" in was else {}
    around = [_change(name, was["versions"].get(name, ""), now["versions"].get(name, "")) for name in versions]
    around += [_change(f"the {name}", str(was[name]), str(now[name])) for name in ("machine", "directory") if name in was]
    code = [_change(CODE[name], was[name][:12], now[name][:12]) for name in compared if was[name] != now[name]]
    return Changes(tuple(code), tuple(filter(None, around)))


def _change(what: str, was: str, now: str) -> str:
    return f"{what} was {was or 'none'} and is {now or 'none'}" if was != now else ""


def check_same_code(folder: Path, changes: Changes) -> None:
    """Raises ConfigError when the code is not that of the run, and says how to get it back."""
    if not changes.code:
        return
    made_of = recorded(folder)[1]["made_of"]
    patch = folder / PATCH
    commit = f"check out {made_of['commit'][:12]}" if made_of["commit"] else "put the script back as it was"
    apply = f", git apply {patch.resolve()}" if patch.is_file() else f" (its patch was {made_of['patch']})" if made_of.get("patch") else ""
    way_out = f"To have that again, {commit}{apply}; or use --changed-code."
    raise ConfigError("--repeat", folder.name, f"the code is not that of the run: {'; '.join(changes.code)}", way_out)


def _loaded(content: Mapping[str, Any], asked: Executed) -> Script:
    """The run's script or the one that replaces it, with the run's arguments or those that replace them. Raises ConfigError."""
    given = asked.arguments or tuple(map(str, content.get(ARGUMENTS, ())))
    if not asked.script and content.get(MODULE):
        return script_loading.load_train(str(content[MODULE]), given, module=True)
    return script_loading.load_train(asked.script or script_in(content), given, asked.module)


def script_in(content: Mapping[str, Any]) -> str:
    """The path of a run's script: in the folder that the run was started in, when it is there."""
    script = str(content["script"])
    there = Path(content.get("made_of", {}).get("directory", ""), script)
    return str(there) if script and there.is_file() else script


def recorded(folder: Path) -> tuple[str, dict[str, Any]]:
    """A run's name, and its record from :func:`describe`; an empty record, where the journal has another text there.

    Raises ConfigError: the journal is empty.
    """
    first = next(read_journal(folder / "journal.jsonl", spans=False), None)
    if not isinstance(first, RunStarted):
        raise ConfigError("RUN", folder.name, f"the journal in {folder} is empty: the run has not begun", "Begin it under another name.")
    return first.run, configuration(first.config)


def settings_in(content: Mapping[str, Any], storage: str = "") -> RunSettings:
    """The settings of a run's record. ``storage`` is the same place again, perhaps with credentials."""
    settings = dict(content["settings"])
    if without_credentials(storage) == settings["storage"]:
        settings["storage"] = storage
    return read(RunSettings, settings)


def find_run(name: str, root: Path, field: str = "RUN") -> Path:
    """The folder of run ``name``, which ``field`` gave: a path, or a name under ``root``. Raises ConfigError."""
    for folder in (Path(name), root / name):
        if (folder / "journal.jsonl").is_file():
            return folder
    runs = sorted(journal.parent.name for journal in root.glob("*/journal.jsonl")) if root.is_dir() else []
    near = difflib.get_close_matches(name, runs, n=3)
    listed = f"{root} has {len(runs)} runs; `fleet runs` lists them." if runs else f"{root} has no run: --storage names another folder."
    there = f"Did you mean {' or '.join(near)}?" if near else listed
    raise ConfigError(field, name, f"no run has this name: neither ./{name} nor {root / name} has a journal.jsonl", there)


def twin_of(plan: RunPlan, world: int | None = None) -> RunPlan:
    """The same run without faults and spares, perhaps at another world size: it must end with the same bits."""
    settings = dataclasses.replace(plan.settings, world=world or plan.settings.world, max_world=0, spares=0, track=TrackSettings())
    first = next(read_journal(plan.journal, spans=False))
    assert isinstance(first, RunStarted)
    return dataclasses.replace(
        plan, name=f"{plan.name}-twin", folder=plan.folder / TWIN, settings=settings, chaos=ChaosSettings(), resume=False,
        twin_since_s=first.unix_time_s,
    )  # fmt: skip


def final_digest(folder: Path) -> str:
    """SHA-256 of the final state, from the journal; empty when the run did not complete."""
    ends = [record for record in read_journal(folder / "journal.jsonl", spans=False) if isinstance(record, RunEnded)]
    return ends[-1].digest if ends else ""


def compare(plan: RunPlan, twin: RunPlan, result: RunResult) -> dict[str, Any]:
    """Whether a run and its twin, which came to ``result``, ended with the same bits: see :mod:`fleet.app.twins`."""
    digests = final_digest(plan.folder), final_digest(twin.folder)
    return twins.verdict(*digests, result.completed, result.status, result.reason, twin.settings.world)


def without_twin(result: RunResult, stopped_by: str, world: int) -> dict[str, Any]:
    """The verdict where no twin is begun: the run has come to ``result``, or a signal, ``stopped_by``, has come when it was complete."""
    if result.completed:
        return twins.not_run(STOPPED, f"{stopped_by}, when all its steps were taken", world)
    return twins.not_run(result.status, result.reason, world)
