"""What is wrong in a batch script of Slurm's and in a Dockerfile, and in the commands of Fleet's that files hold. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from fleet.app.deploy import entrypoint, rules, secrets
from fleet.errors import ConfigError

DIRECTIVE = re.compile(r"#SBATCH\s+--([\w-]+)(?:[= ](.*))?")
ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(\S*)")
NEEDED = ("set -euo pipefail", "ray symmetric-run", "--no-kill", "--kill-on-bad-exit=0", "fleet stop", "scontrol requeue")


def judged(
    text: str, field: str, accepts: entrypoint.Accepts, room: int | None = None, *, detached: bool | None = None
) -> Iterator[ConfigError]:
    """What ``entrypoint.check`` raises, as a refusal of ``field``."""
    try:
        entrypoint.check(text, field, accepts, room, detached=detached)
    except ConfigError as error:
        reason = error.reason if error.field == field else f"{error.field} = {error.value!r}: {error.reason}"
        yield ConfigError(field, rules.shown(text), reason, error.way_out)


# ---- batch scripts -----------------------------------------------------------------------------------------------------------------------


def secrets_in_script(text: str) -> Iterator[ConfigError]:
    """Secrets in clear text, and in variables that are set."""
    for number, line in enumerate(text.splitlines(), 1):
        set_here = ASSIGNED.match(line.strip())
        reason = secrets.in_variable(set_here[1], set_here[2]) if set_here else secrets.in_value(line)
        if reason:
            yield ConfigError(f"line {number}", secrets.HIDDEN, f"{reason}, in clear text", "Read it from a file that only you can read.")


def script(text: str, accepts: entrypoint.Accepts) -> Iterator[ConfigError]:
    """What is wrong in a script for ``sbatch``."""
    if not text.startswith(("#!/bin/bash\n", "#!/usr/bin/env bash\n")):
        yield ConfigError(
            "line 1", rules.shown(text.partition("\n")[0]), "Slurm takes it for no script of bash's", "Begin it with #!/bin/bash."
        )
    found = directives(text)
    yield from rules.broken(found, rules.BATCH)
    body = text.replace("\\\n", " ")
    for word in NEEDED:
        if word not in re.sub(r"^#.*$", "", body, flags=re.M):
            yield ConfigError("script", "", f"{word} is missing from it")
    yield from _step(body, found, accepts)


def directives(text: str) -> dict[str, str]:
    """Option -> value of the lines that Slurm reads: those before the first command."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if match := DIRECTIVE.fullmatch(line.rstrip()):
            found[match[1]] = (match[2] or "").strip()
        elif line.startswith("#SBATCH"):
            found[line] = ""
    return found


def _step(body: str, found: dict[str, str], accepts: entrypoint.Accepts) -> Iterator[ConfigError]:
    """The line that starts Ray on all hosts, and the run on the first."""
    line = next((each for each in body.splitlines() if "ray symmetric-run" in each and not each.startswith("#")), "")
    start, _, command = line.partition(" -- ")
    if not line:
        return
    hosts = re.search(r"--min-nodes[= ](\S+)", start)
    if hosts is None or hosts[1] != found.get("nodes"):
        yield ConfigError("--min-nodes", hosts[1] if hosts else "", f"--nodes asks for {found.get('nodes')} hosts", "Wait for all of them.")
    yield from _given(start, found)
    counts = [found.get("nodes", ""), _digits(found.get("gpus-per-node", "")) or found.get("cpus-per-task", "")]
    room = int(counts[0]) * int(counts[1]) if all(map(str.isdigit, counts)) else None
    yield from judged(command.strip().removesuffix("&").strip(), "command", accepts, room, detached=False)
    addresses = re.findall(r'--address[= ]("[^"]*"|\S+)', line)
    if len(set(addresses)) > 1:
        yield ConfigError("command", rules.shown(addresses), "the run would join another cluster than the one that is started here")


def _given(start: str, found: dict[str, str]) -> Iterator[ConfigError]:
    """What Ray is told that a host has is what Slurm gives."""
    for option, given in (("--num-cpus", found.get("cpus-per-task", "")), ("--num-gpus", _digits(found.get("gpus-per-node", "")) or "0")):
        matched = re.search(rf"{option}[= ](\S+)", start)
        if matched is None or matched[1] != given:
            yield ConfigError(option, matched[1] if matched else "", f"a host has {given} by the lines of #SBATCH")


def _digits(gpus: str) -> str:
    """The number in ``h100:8``."""
    return gpus.rpartition(":")[2]


# ---- Dockerfiles -------------------------------------------------------------------------------------------------------------------------


def _instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, the rest), without comments."""
    lines = re.sub(r"^\s*#.*\n?", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    parts = [line.strip().partition(" ") for line in lines if line.strip()]
    return [(word.upper(), rest.strip()) for word, _, rest in parts]


def secrets_in_dockerfile(text: str) -> Iterator[ConfigError]:
    """Secrets in clear text: whoever has the image can read them."""
    for word, rest in _instructions(text):
        pairs = [each.partition("=") for each in _words(rest)] if word in ("ENV", "ARG") else []
        reasons = [secrets.in_variable(name, value) for name, _, value in pairs] or [secrets.in_value(rest)]
        if reason := next(filter(None, reasons), ""):
            yield ConfigError(word, secrets.HIDDEN, f"{reason}, in clear text", "Give it to the container when it starts.")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


INSTRUCTIONS = {
    "FROM", "RUN", "ENV", "ARG", "WORKDIR", "COPY", "ADD", "USER", "LABEL", "EXPOSE", "VOLUME", "SHELL", "ENTRYPOINT", "CMD",
    "STOPSIGNAL", "HEALTHCHECK", "ONBUILD",
}  # fmt: skip


def dockerfile(text: str) -> Iterator[ConfigError]:
    """What is wrong in a Dockerfile."""
    found = _instructions(text)
    stages = {rest.split()[2] for word, rest in found if word == "FROM" and len(rest.split()) > 2}
    for word, rest in found:
        if word not in INSTRUCTIONS:
            yield ConfigError(word, rules.shown(rest), "there is no such instruction")
        image = rest.split()[0] if rest else ""
        if word == "FROM" and image not in stages and not rules.pinned(image):
            yield ConfigError("FROM", image, "it takes an image by its tag or digest", "Name the version that was tested.")
    if not found or found[0][0] not in ("FROM", "ARG"):
        yield ConfigError("FROM", "", "it is missing: a Dockerfile begins with it")
    if not any(word == "RUN" and re.search(r"fleet_train-\S+\.whl|fleet-train\S* @ git\+\S+@\S+", rest) for word, rest in found):
        way_out = "Add: RUN pip install 'fleet-train @ git+URL@TAG', or COPY a wheel and install that."
        yield ConfigError("RUN", "", "nothing installs Fleet from a wheel, or from a git URL with a tag", way_out)
    if not any(word in ("COPY", "ADD") and ".whl " not in rest for word, rest in found):
        yield ConfigError("COPY", "", "the folder of the script is not in the image", "Add: COPY . FOLDER.")
    if any(word == "WORKDIR" and not rest.startswith("/") for word, rest in found):
        yield ConfigError("WORKDIR", "", "it takes an absolute path")
