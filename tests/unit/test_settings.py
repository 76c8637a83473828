"""Settings: one default each, from files, from key=value and from Python; what is wrong is refused by name before any process starts."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleet.app.cli import config as cli_config
from fleet.app.cli import main as cli
from fleet.app.cli import run as cli_run
from fleet.app.cli.config import FLAGS
from fleet.app.configuration import Configuration, as_toml, configured, differing, every, known
from fleet.app.plans import RunPlan, describe
from fleet.app.policy_choice import PORTS, check, completed, make, own_settings
from fleet.errors import ConfigError
from fleet.settings.fields import from_text, keys, read, setting, shown, values_of
from fleet.settings.run import CheckpointSettings, RunSettings, VerifySettings
from policies.recovery import ReformPromoteRegrow
from policies.straggler.mitigation import Mitigator

ROOT = Path(__file__).parents[2]
GOOD = "def train(run):\n    pass\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "good.py").write_text(GOOD)


def called(*arguments: str) -> tuple[object, str]:
    """(what the command ended with, what it printed)."""
    done = CliRunner().invoke(cli.app, arguments)
    return done.exception or done.exit_code, done.output


# ---- one file, one default ---------------------------------------------------------------------------------------------------------------


def test_what_is_printed_can_be_used_as_it_is(tmp_path: Path) -> None:
    assert called("init", "fleet.toml")[0] == 0
    assert (tmp_path / "fleet.toml").read_text() == as_toml()
    assert differing(configured(tmp_path / "fleet.toml")) == {}
    assert called("doctor", "--config", "fleet.toml") == (0, "all is as by default\n")
    assert configured(tmp_path / "fleet.toml").chaos == configured().chaos


def test_every_setting_is_printed_with_its_meaning() -> None:
    lines = as_toml().splitlines()
    for key in every().values():
        assert key.meaning.endswith("."), key.name
        assert key.kind is dict or f"# {key.meaning}" in lines, key.name


def test_all_fields_of_all_settings_are_known() -> None:
    assert set(known()) >= {*keys(RunSettings), "chaos.mtbf_s", "straggler.gain", "timeouts.run_s"}
    printed = tomllib.loads(as_toml())
    assert {name for name in flat_names(printed) if name != "version"} == {key.name for key in every().values() if key.kind is not dict}


def flat_names(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from flat_names(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_options_of_the_command_have_no_defaults_of_their_own() -> None:
    from typer.main import get_command

    parameters = {each.name: each for each in get_command(cli.app).commands["run"].params}  # type: ignore[attr-defined]
    for name, key in FLAGS.items():
        default = cli_config.KEYS[key].default
        assert parameters[name].default is None
        assert parameters[name].show_default == (str(default) if not isinstance(default, bool) else False)
        assert parameters[name].help == cli_config.KEYS[key].meaning


def _constants(path: Path) -> Iterator[tuple[str, str, object]]:
    """(where, name, default) of arguments of functions, and of fields of classes, whose default is written out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            plain, named = node.args.args, node.args.kwonlyargs
            pairs = [*zip(plain[len(plain) - len(node.args.defaults) :], node.args.defaults, strict=True)]
            pairs += [(arg, default) for arg, default in zip(named, node.args.kw_defaults, strict=True) if default is not None]
            found = [(arg.arg, default) for arg, default in pairs]
        elif isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and each.value is not None]
            found = [(each.target.id, each.value) for each in fields if isinstance(each.target, ast.Name) and each.value is not None]
        else:
            continue
        yield from ((node.name, name, default.value) for name, default in found if isinstance(default, ast.Constant))


PLAIN = (None, False, True, "", 0, 0.0, 1)
"""Defaults that mean nothing in particular."""


def test_no_default_is_written_twice() -> None:
    usual = {(key.name.rpartition(".")[2], repr(key.default)) for key in every().values() if key.default not in PLAIN}
    files = [*ROOT.glob("policies/**/*.py"), *ROOT.glob("fleet/app/**/*.py"), *ROOT.glob("chaos/settings.py")]
    again = [
        f"{path.name}: {where}: {name} = {value!r}"
        for path in files
        for where, name, value in _constants(path)
        if (name, repr(value)) in usual
    ]  # fmt: skip
    assert not again, again


# ---- later over earlier ------------------------------------------------------------------------------------------------------------------


def run_with(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> RunPlan:
    made: list[RunPlan] = []
    with monkeypatch.context() as patch:
        patch.setattr(cli_run, "_execute", lambda plan, *rest: made.append(plan) or 0)
        assert called("run", "good.py", *arguments)[0] == 0
    return made[0]


def test_later_wins_and_options_win_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.toml").write_text(
        'version = 1\nworld = 3\nspares = 2\n[straggler]\ngain = 0.3\nchanges = 2\n[options]\nlr = 3e-4\nn = "7"\n'
    )
    (tmp_path / "b.toml").write_text('chaos = "storm"\n[straggler]\ngain = 0.4\n[checkpoint]\npolicy = "fixed"\ninterval_s = 30\n')
    both = ("--config", "a.toml", "--config", "straggler.gain=0.2", "--config", "b.toml", "--config", "options.n=8")
    plan = run_with(monkeypatch, *both)
    assert (plan.settings.world, plan.settings.spares) == (3, 2)
    assert (plan.settings.straggler.gain, plan.settings.straggler.changes) == (0.4, 2)
    assert plan.settings.options == {"lr": "0.0003", "n": "8"} and plan.settings.checkpoint.interval_s == 30.0
    assert plan.chaos.mtbf_s == 12.0
    over = ("--world", "2", "--checkpoint", "daly", "--chaos", "off", "--set", "n=9", "--verify", "0.1")
    plan = run_with(monkeypatch, *both, "--config", "timeouts.progress_s=30", *over)
    assert (plan.settings.world, plan.settings.spares, plan.settings.verify.compute) == (2, 2, 0.1)
    assert (plan.settings.checkpoint.policy, plan.settings.checkpoint.interval_s) == ("daly", None)
    assert not plan.chaos.on and plan.settings.timeouts.progress_s == 30.0 and plan.settings.options["n"] == "9"


def test_the_journal_has_all_values_and_a_run_is_made_again_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = run_with(monkeypatch, "--config", "straggler.gain=0.3", "--config", "recovery.policy=restart")
    written = json.loads(describe(plan))
    assert written["settings"]["straggler"]["gain"] == 0.3 and written["settings"]["recovery"]["policy"] == "restart"
    assert read(RunSettings, written["settings"]) == completed(plan.settings)


def test_python_gives_the_same_as_a_file(tmp_path: Path) -> None:
    import fleet

    (tmp_path / "fleet.toml").write_text('world = 3\n[timeouts]\nrun_s = "none"\n[chaos]\nmtbf_s = 9\nkinds = ["hang"]\n')
    nested = {"world": 3, "timeouts": {"run_s": None}, "chaos": {"mtbf_s": 9, "kinds": ("hang",)}}
    found = fleet.configured(nested)
    assert isinstance(found, Configuration) and found == configured(Path("fleet.toml")) == configured("world=3", "chaos=mtbf=9,kinds=hang")
    assert differing(found) == {"world": (3, 4), "chaos.mtbf_s": (9.0, None), "chaos.kinds": (("hang",), None)}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("preflight", "on", True), ("straggler.enabled", "no", False), ("seed", "7", 7), ("straggler.gain", "0.2", 0.2),
        ("reduction", "native", "native"), ("reduction", '"native"', "native"), ("storage", "7", "7"), ("timeouts.run_s", "none", None),
        ("timeouts.run_s", "900", 900.0), ("chaos.kinds", "hang,slow", ("hang", "slow")), ("chaos.kinds", '["hang"]', ("hang",)),
        ("options", "", None),
    ],
)  # fmt: skip
def test_text_is_read_by_the_kind_of_the_setting(name: str, text: str, value: object) -> None:
    if value is None and name == "options":
        with pytest.raises(ConfigError, match="a table"):
            from_text(known(), name, text)
    else:
        assert from_text(known(), name, text) == {name: value}


def test_what_is_shown_is_read_again_as_it_was() -> None:
    for value in (None, True, 3, 0.1, 1e-5, 'a "b" \\ \n ü', ("x", "y"), {"a b": 1}):
        found = tomllib.loads(f"value = {shown(value)}")["value"]
        assert found == (list(value) if isinstance(value, tuple) else "none" if value is None else value)


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------


WRONG = {
    "straggler.gian = 0.2": ("straggler.gian = 0.2", "no such setting", "Nearest: straggler.gain"),
    "gain = 0.2": ("gain = 0.2", "no such setting", "straggler.gain"),
    "[strangler]\ngain = 1": ("strangler", "no such setting", "Nearest: straggler"),
    "[straggler.settings]\nwindow = 1": ("straggler.settings", "declares no settings"),
    'world = "four"': ("world = 'four'", "a whole number", "default is 4"),
    "world = 4.5": ("world = 4.5", "a whole number"),
    "world = true": ("world = True", "a whole number"),
    "world = 0": ("world = 0", "at least 1"),
    "preflight = 1": ("preflight = 1", "on or off"),
    "storage = 7": ("storage = 7", "it takes text"),
    "straggler = 7": ("straggler = 7", "table of settings", "straggler.gain"),
    "straggler.gain = nan": ("straggler.gain = nan", "it takes a number"),
    "straggler.gain = 1.5": ("straggler.gain = 1.5", "less than 1"),
    'chaos.kinds = "hang"\nchaos.mtbf_s = 9': ("chaos.kinds = 'hang'", "a list of texts"),
    "options.n = true": ("options.n = True", "it takes text", "in quotes"),
    "timeouts.form_s = 400": ("timeouts.progress_s = 300.0", "must be greater than timeouts.form_s = 400"),
    'chaos.mtbf_s = 9\nchaos.trace = "x.csv"': ("chaos.trace = 'x.csv'", "contradicts mtbf_s"),
    'chaos.kinds = ["hang"]': ("chaos.kinds", "nothing says how many"),
    "checkpoint.interval_s = 30": ("checkpoint.interval_s = 30.0", "exact computes the interval itself", "policy fixed"),
    'checkpoint.policy = "fixed"': ("checkpoint.interval_s = None", "fixed needs an interval"),
    'optimizer_sharding = "zero1"\nreduction = "native"': ("optimizer_sharding = 'zero1'", "reduction is native", "tree"),
    "min_ranks = 9": ("min_ranks = 9", "could never start"),
    "version = 2": ("version = 2", "newer than this Fleet, which reads version 1", "a newer Fleet"),
    'version = "1"': ("version = '1'", "must be 1"),
    "world = ": ("--config", "it is no TOML", "Invalid value"),
    'recovery.policy = "hope"': ("recovery.policy = 'hope'", "no such policy", "in-place, restart", "package.module:Class"),
    'placement.policy = "hope"': ("placement.policy = 'hope'", "no such policy", "blocks"),
    "placement.settings.n = 1": ("placement.settings", "declares no settings"),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused_by_name_before_anything_starts(text: str, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(text)
    for words in (("run", "good.py", "--config", "fleet.toml"), ("doctor", "--config", "fleet.toml")):
        error, _ = called(*words)
        assert isinstance(error, ConfigError)
        assert all(word in str(error) for word in WRONG[text]), error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nowhere.toml", ("--config", "nowhere.toml", "No such file")),
        (".", ("--config", "Is a directory")),
        ("straggler.gian=0.2", ("straggler.gian", "Nearest: straggler.gain")),
        ("straggler.gain=much", ("straggler.gain", "it takes a number")),
        ("straggler=on", ("straggler", "table of settings")),
        ("chaos=mtbf=often", ("chaos.mtbf", "is not a time")),
        ("chaos.mtbf_s=often", ("chaos.mtbf_s", "a number, or none")),
    ],
)
def test_a_wrong_pair_is_refused_by_name(given: str, words: tuple[str, ...]) -> None:
    error, _ = called("run", "good.py", "--config", given)
    assert isinstance(error, ConfigError) and all(word in str(error) for word in words), error


def test_the_command_ends_with_exit_code_2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text("[straggler]\ngian = 0.2\n")
    monkeypatch.setattr("sys.argv", ["fleet", "doctor", "--config", "fleet.toml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and "in fleet.toml" in capsys.readouterr().err


def test_the_check_says_what_is_not_as_usual(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text("world = 3\n[straggler]\ngain = 0.2\n")
    assert called("doctor", "--config", "fleet.toml") == (0, "world = 3  # 4\nstraggler.gain = 0.2  # 0.1\n")
    said = json.loads(called("doctor", "--config", "fleet.toml", "--json")[1])
    assert said == {"world": {"value": 3, "default": 4}, "straggler.gain": {"value": 0.2, "default": 0.1}}


# ---- policies ----------------------------------------------------------------------------------------------------------------------------

MINE = """
from dataclasses import dataclass
from fleet.errors import ConfigError
from fleet.settings.fields import setting
from fleet.protocol.slowness import Remedy


@dataclass(frozen=True, kw_only=True)
class Own:
    steps: int = setting(100, "So many steps nothing is done.")

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError("steps must be positive")


class Patient:
    Settings = Own

    def __init__(self, own):
        self.own = own

    def configure(self, settings): ...
    def look(self, timings, circumstances, now_s): return Remedy(())


class Bare:
    def configure(self, settings): ...
    def look(self, timings, circumstances, now_s): return Remedy(())


class Blind(Bare):
    look = None


class Narrow(Bare):
    def look(self, timings): ...


class Odd(Bare):
    def __init__(self): raise RuntimeError("not today")


class Strange(Bare):
    @dataclass(frozen=True)
    class Settings:
        what: complex = 1j


bare = Bare()
"""


def test_a_policy_of_ones_own_is_made_with_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_a.py").write_text(MINE)
    plan = run_with(monkeypatch, "--config", "straggler.policy=mine_a:Patient", "--config", "straggler.settings.steps=5")
    assert make("straggler", plan.settings).own.steps == 5
    assert completed(plan.settings).straggler.settings == {"steps": 5}
    assert json.loads(describe(plan))["settings"]["straggler"]["settings"] == {"steps": 5}
    for name in ("mine_a:Bare", "mine_a:bare"):
        assert type(make("straggler", configured(f"straggler.policy={name}").run)).__name__ == "Bare"


POLICIES = {
    "nowhere_at_all:Patient": ("cannot be imported", "ModuleNotFoundError", "beside the train script"),
    "mine_b:Nobody": ("cannot be imported", "AttributeError", "Nobody"),
    "broken_b:X": ("cannot be imported", "ValueError: no import"),
    ":X": ("cannot be imported",),
    "mine_b:Blind": ("no policy for straggler", "no method look(timings, circumstances, now_s)", "fleet.protocol.ports.StragglerPolicy"),
    "mine_b:Own": ("no policy for straggler", "no method configure(settings)"),
    "mine_b:Narrow": ("look cannot be called as look(timings, circumstances, now_s)",),
    "mine_b:Odd": ("it cannot be made: RuntimeError: not today",),
    "mine_b:Strange": ("straggler.settings", "what is declared as", "complex"),
    "mine_b": ("there is no such policy", "least-loss"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_no_policy_is_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine_b.py").write_text(MINE)
    (tmp_path / "broken_b.py").write_text("raise ValueError('no import')\n")
    (tmp_path / "fleet.toml").write_text(f'straggler.policy = "{name}"\n')
    for words in (("run", "good.py", "--config", f"straggler.policy={name}"), ("doctor", "--config", "fleet.toml")):
        error, _ = called(*words)
        assert isinstance(error, ConfigError)
        assert all(word in str(error) for word in POLICIES[name]), error
        assert error.field in ("straggler.policy", "straggler.settings")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("pair", "words"),
    [("steps=0", ("straggler.settings", "steps must be positive")), ("stops=3", ("straggler.settings.stops", "straggler.settings.steps"))],
)
def test_what_the_policy_itself_refuses_is_refused(pair: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mine_c.py").write_text(MINE)
    error, _ = called("run", "good.py", "--config", "straggler.policy=mine_c:Patient", "--config", f"straggler.settings.{pair}")
    assert isinstance(error, ConfigError) and all(word in str(error) for word in words), error


def test_another_policy_is_not_told_what_a_file_has_for_the_one_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(as_toml())
    over = {"checkpoint.policy": "daly", "straggler.policy": "pkg:Mine"}
    found = configured(
        Path("fleet.toml"), {"straggler": {"policy": "pkg:Other", "settings": {"m": 1}}}, "straggler.settings.n=2", over=over
    )
    assert found.run.straggler.settings == {"n": 2}


def test_fleets_own_policies_are_made_as_a_run_has_them() -> None:
    run = configured("straggler.gain=0.3", "budgets.slot=5").run
    check(run)
    slow, recovery = make("straggler", run), make("recovery", run)
    assert isinstance(slow, Mitigator) and slow.settings is run.straggler and own_settings("straggler", run) is None
    assert isinstance(recovery, ReformPromoteRegrow) and recovery.budgets.slot == 5
    assert set(PORTS) == {field.name for field in dataclasses.fields(RunSettings) if hasattr(getattr(RunSettings(), field.name), "policy")}
    assert make("checkpoint", run).law == CheckpointSettings().policy


def test_code_of_somebody_else_is_not_run_where_a_run_only_waits(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("raise SystemExit('imported')\n")
    settings, _, _ = cli_run.checked("good.py", ["--config", "straggler.policy=loud:Policy", "--config", "world=3"], tmp_path)
    assert settings.straggler.policy == "loud:Policy" and settings.world == 3


def test_copies_of_parameters_have_one_setting_and_a_clear_name_on_the_command_line(tmp_path: Path) -> None:
    """What is given on the command line wins over a file, as for any other option."""
    (tmp_path / "good.py").write_text("def train(run): ...\n")
    arguments = ["--world", "4", "--optimizer-sharding", "fsdp", "--config", "optimizer_copies=3", "--config", "optimizer_copies=2"]
    settings, given, _ = cli_run.checked("good.py", arguments, tmp_path)
    assert settings.optimizer_copies == 2 and "config" in given
    with pytest.raises(ConfigError, match="Use --config optimizer_copies=1 or fewer"):
        cli_run.checked("good.py", [*arguments, "--world", "2"], tmp_path)


def test_gradients_that_leave_in_the_backward_are_not_computed_again() -> None:
    RunSettings(optimizer_sharding="zero1", verify=VerifySettings(compute=0.1))
    with pytest.raises(ConfigError, match="verify.compute") as refused:
        RunSettings(optimizer_sharding="fsdp", verify=VerifySettings(compute=0.1))
    assert "Set it to 0" in str(refused.value)


def test_a_setting_of_a_kind_that_nobody_can_write_is_a_mistake_of_ours() -> None:
    @dataclasses.dataclass
    class Wrong:
        what: int = setting(1, "A number.")

    Wrong.__annotations__["what"] = complex
    with pytest.raises(TypeError, match="what is declared as"):
        keys(Wrong)  # type: ignore[arg-type]


def test_values_come_back_as_they_were_set() -> None:
    found = configured("timeouts.run_s=900", "straggler.gain=0.2").run
    assert values_of(found)["timeouts.run_s"] == 900.0 and read(RunSettings, json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_a_number_is_finite_but_for_cores_that_no_machine_has() -> None:
    """``inf`` was refused, which the setting's own words name."""
    assert RunSettings(overlap_cores=math.inf).overlap_cores == math.inf
    for value in (-1.0, math.nan):
        with pytest.raises(ConfigError, match="overlap_cores"):
            RunSettings(overlap_cores=value)
    with pytest.raises(ConfigError, match="threads_per_rank"):
        RunSettings(threads_per_rank=math.inf)  # type: ignore[arg-type]
