"""``fleet init``: a commented train script that runs as it is, or a file of all settings."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fleet.errors import ConfigError

NEXT = (
    "fleet run {script} --world 2",
    'fleet run {script} --world 3 --spares 1 --chaos "mtbf=3s,kinds=kill_rank" --set steps=600 --twin',
)
PLAIN_NEXT = (
    "torchrun --standalone --nproc-per-node 2 {script}",
    'fleet run --plain {script} --world 2 --chaos "mtbf=5s,duration=30s,kinds=kill_rank" -- --steps 2000',
)


def script(name: str, *, plain: bool) -> str:
    """The text of a train script of this name: of Fleet's, or for torchrun."""
    import jinja2

    environment = jinja2.Environment(loader=jinja2.PackageLoader("fleet.app.cli"), undefined=jinja2.StrictUndefined)
    return environment.get_template("plain.py.j2" if plain else "train.py.j2").render(name=name) + "\n"


def init(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A script, or a .toml file of all settings; nothing is overwritten.")
    ] = "train.py",
    plain: Annotated[
        bool, typer.Option("--plain", help="The same network as an ordinary torchrun script, for `fleet run --plain`.")
    ] = False,
) -> None:
    """Write a commented train script, which runs as it is; or all settings with their defaults, as a file for `fleet run --config`."""
    path = Path(file)
    if path.suffix not in (".py", ".toml"):
        raise ConfigError("FILE", file, "a train script is a Python file, and settings are a TOML file", "Name train.py or fleet.toml.")
    from fleet.app import configuration

    if not path.parent.is_dir():
        raise ConfigError("FILE", file, f"there is no folder {path.parent}", "Create it first.")
    try:
        with path.open("x") as sink:
            sink.write(configuration.as_toml() if path.suffix == ".toml" else script(path.name, plain=plain))
    except FileExistsError as error:
        raise ConfigError("FILE", file, "it is there already, and would be lost", "Name another file.") from error
    print(f"{file} is written. Next:\n")
    if path.suffix == ".toml":
        print(f"  fleet run train.py --config {shlex.quote(file)}")
        return
    for line in PLAIN_NEXT if plain else NEXT:
        print(f"  {line.format(script=shlex.quote(file))}")
