"""The house rules, applied to every file of the project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.tidy import documents, layout, rules

ROOT = Path(__file__).parents[2]
GENERATED = {"__pycache__", "runs", "build", "dist", "site"}

SKIPPED: dict[str, str] = {
    "tests/support/programs.py": "nobody can install a GPU, or without root a browser; in CI what is skipped but for want of a GPU fails",
}
"""Test file -> why some of its tests may be skipped or fail."""

DISTRIBUTIONS = {
    "grpc": "grpcio", "prometheus_client": "prometheus-client", "grafana_api": "grafana-api", "sklearn": "scikit-learn",
    "grafana_foundation_sdk": "grafana-foundation-sdk", "yaml": "pyyaml", "PIL": "pillow", "chaoslib": "chaostoolkit-lib",
    "tensorboardX": "tensorboardx", "mlflow": "mlflow-skinny", "opentelemetry": "opentelemetry-sdk",
    "kubernetes_validate": "kubernetes-validate", "pynvml": "nvidia-ml-py",
}  # fmt: skip
"""Imported name -> distribution, where they differ."""

FOR_US = {"dev", "bench"}
"""Extras that no user installs."""


def _files(*suffixes: str) -> dict[str, str]:
    """Relative path -> text of the project's files, the environment and what runs leave behind aside."""
    found = {}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if (not name.startswith(".") or name == ".ci") and name not in GENERATED]
        for path in (Path(folder, name) for name in names):
            if path.suffix in suffixes and path.is_file():
                found[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    return dict(sorted(found.items()))


PYTHON = _files(".py")
DOCUMENTS = {path: text for path, text in _files(".md").items() if path.startswith("docs/") or "/" not in path}


def _check(rule: Callable[[str, str], list[str]], files: dict[str, str]) -> None:
    assert files
    faults = [fault for path, text in files.items() for fault in rule(path, text)]
    assert not faults, "\n".join(["", *faults])


def shipped(path: str) -> bool:
    """Whether the file is a part of what users install."""
    return path.split("/", maxsplit=1)[0] in rules.SHIPPED


def test_imports_stay_within_their_zone() -> None:
    _check(rules.import_faults, PYTHON)


def test_rays_internals_are_used_behind_one_wall() -> None:
    _check(rules.ray_faults, {path: text for path, text in PYTHON.items() if not path.startswith("tests/")})
    assert set(rules.RAY_WALL) <= set(PYTHON)


def test_the_kernel_is_asked_in_one_place() -> None:
    _check(rules.kernel_faults, {path: text for path, text in PYTHON.items() if shipped(path)})
    assert rules.KERNEL_WALL in PYTHON


def test_files_and_functions_are_short() -> None:
    _check(rules.length_faults, PYTHON)
    lengths = sorted(length for source in PYTHON.values() for length, _, _ in rules.function_lengths(source))
    assert lengths[len(lengths) * 95 // 100] <= 50


def test_time_and_randomness_are_arguments_in_the_core() -> None:
    _check(rules.clock_and_chance_faults, {path: text for path, text in PYTHON.items() if rules.is_pure(path)})


def test_no_handler_hides_an_error() -> None:
    _check(rules.handler_faults, PYTHON)


def test_no_code_reads_the_text_of_a_reason() -> None:
    places = (*rules.SHIPPED, "benchmarks", "examples")
    _check(rules.reason_faults, {path: text for path, text in PYTHON.items() if path.split("/", maxsplit=1)[0] in places})


def test_no_test_is_skipped_without_a_listed_reason() -> None:
    tests = {path: text for path, text in PYTHON.items() if path.startswith("tests/")}
    _check(lambda path, text: rules.skip_faults(path, text, SKIPPED), tests)
    assert set(SKIPPED) <= set(tests)
    assert all(SKIPPED.values())


def test_public_names_of_the_core_say_what_they_are() -> None:
    _check(rules.docstring_faults, {path: text for path, text in PYTHON.items() if path.startswith("fleet/")})


def test_identifiers_have_the_words_of_the_field() -> None:
    _check(rules.old_word_faults, PYTHON)
    assert all(rules.OLD_WORDS_KEPT.values())


def test_no_public_class_name_stands_in_two_places() -> None:
    faults = rules.twice_defined({path: text for path, text in PYTHON.items() if shipped(path)})
    assert not faults, "\n".join(["", *faults])


def test_no_file_names_the_machine_it_was_written_on() -> None:
    texts = _files(".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".csv", ".json", ".html", ".j2")
    texts |= {name: (ROOT / name).read_text() for name in ("Makefile", ".ci/run", ".pre-commit-config.yaml", ".gitignore")}
    _check(rules.machine_path_faults, texts)


def _exists(start: Path) -> Callable[[str], bool]:
    return lambda name: (start / name).exists() or ("*" in name and any(start.glob(name)))


def _heading(document: Path) -> Callable[[str, str], bool]:
    def there(target: str, anchor: str) -> bool:
        path = document.parent / target if target else document
        return path.suffix != ".md" or anchor in documents.anchors(path.read_text())

    return there


def test_links_lead_somewhere() -> None:
    _check(lambda path, text: documents.link_faults(path, text, _exists((ROOT / path).parent), _heading(ROOT / path)), DOCUMENTS)


def test_paths_in_documents_exist() -> None:
    _check(lambda path, text: documents.path_faults(path, text, _exists(ROOT)), DOCUMENTS)


def _commands() -> dict[str, set[str]]:
    group = import_module("typer.main").get_command(import_module("fleet.app.cli.main").app)
    return {name: {"--help"} | _options(command) for name, command in group.commands.items()}


def _options(command: Any) -> set[str]:
    """Of a command, and of those under it."""
    own = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*map(_options, getattr(command, "commands", {}).values()))


def test_commands_in_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = _commands()
    _check(lambda path, text: documents.make_faults(path, text, makefile), DOCUMENTS)
    _check(lambda path, text: documents.command_faults(path, text, commands), DOCUMENTS)
    _check(lambda path, text: documents.benchmark_faults(path, text, _exists(ROOT)), DOCUMENTS)


def _project() -> dict[str, object]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def test_what_is_imported_is_declared() -> None:
    project: Any = _project()
    lists = [project["dependencies"], *(some for name, some in project["optional-dependencies"].items() if name not in FOR_US)]
    declared = {re.split(r"[\[<>=~!; ]", text)[0] for some in lists for text in some}
    imported = {name for path, text in PYTHON.items() if shipped(path) for name in rules.third_party(path, text)}
    assert {DISTRIBUTIONS.get(name, name) for name in imported} <= declared


def test_pins_are_exact_and_need_no_index() -> None:
    lines = [line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9-]*(\[[a-z,]+\])?==([0-9]+!)?[0-9][0-9a-z.]*", line)] == []


def test_every_package_is_listed_by_name() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    assert listed == {path.rpartition("/")[0].replace("/", ".") for path in PYTHON if shipped(path)}


def _run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_fleet_loads_neither_torch_nor_ray() -> None:
    heavy = _run("import fleet, fleet.machine.core, sys; print({'torch', 'ray', 'numpy', 'actors'} & set(sys.modules))")
    assert heavy.strip() == "set()"


NEED_RAY = {f"fleet.app.{name}" for name in ("foreign", "in_cluster", "link_preflight", "nodes_wanted", "ray_trainer", "recipes", "remote")}
"""Of all but the processes of a run: what loads Ray at once. The rest does without, or waits until it needs it."""


def test_few_modules_need_ray_to_be_imported() -> None:
    rooms = ("fleet/", "policies/", "storage/", "chaos/", "dashboards/", "actors/rank/", "actors/plain/")
    names = [layout.module_name(path) for path in PYTHON if path.startswith(rooms) and "__main__" not in path]
    assert len(names) > 400
    program = f"""
import importlib, sys
sys.modules['ray'] = None
for name in {names}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, '' if str(error.name).startswith('ray') else error)
"""
    assert {line.strip() for line in _run(program).splitlines()} == NEED_RAY
