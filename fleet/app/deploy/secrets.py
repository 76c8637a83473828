"""What looks like a secret in clear text. Pure.

It finds what has a known form (keys of clouds and of services, a password in a URL, a private key) and what stands under a name that says
so. A secret of another form under another name is not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleet.errors import ConfigError

HIDDEN = "***"
"""What is shown in the place of a secret."""
FORMS = {
    "it is a URL with a password in it": re.compile(r"://[^/@\s:]*:[^/@\s]+@"),
    "it is a URL with a signature or a key in it": re.compile(
        r"[?&](?:X-Amz-Signature|X-Goog-Signature|sig|signature|token|key)=[^&\s]{8,}", re.I
    ),
    "it looks like an AWS access key": re.compile(r"(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])"),
    "it looks like a key of Google's": re.compile(r"(?<![\w-])AIza[\w-]{35}(?![\w-])"),
    "it looks like a token of a service": re.compile(
        r"(?<![\w-])(?:gh[pousr]_\w{30,}|hf_\w{30,}|glpat-[\w-]{20,}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,})"
    ),
    "it is a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}  # fmt: skip
AWS_SECRET = re.compile(r"(?<![A-Za-z0-9/+_.-])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=_.-])")
MOST_SLASHES = 3
"""More of them in 40 characters are a path."""
SECRET_NAMES = re.compile(r"PASSWORD|PASSWD|SECRET|TOKEN|CREDENTIAL|(?:API|ACCESS|PRIVATE)_?KEY(?!_PATH|_FILE)", re.I)
WAY_OUT = "Leave it out of the file: give the node a role, or name a Secret that has it (kuberay.secret, kuberay.secret_keys)."


def in_value(text: str) -> str:
    """Why ``text`` is taken for a secret, or holds one; "" where nothing in it has such a form."""
    for reason, form in FORMS.items():
        if form.search(text):
            return reason
    return "it looks like an AWS secret key" if any(map(_is_mixed, AWS_SECRET.findall(text))) else ""


def in_variable(name: str, value: object) -> str:
    """Why the environment variable ``name`` is taken for a secret in clear text; "" where it is not."""
    if SECRET_NAMES.search(name) and value not in ("", None):
        return "a variable of this name holds a secret"
    return in_value(value) if isinstance(value, str) else ""


def _is_mixed(text: str) -> bool:
    """Of all three kinds of characters, unlike a digest in hexadecimal, and no path."""
    return all(re.search(kind, text) for kind in ("[a-z]", "[A-Z]", "[0-9]")) and text.count("/") <= MOST_SLASHES


def found(content: object, field: str = "") -> Iterator[ConfigError]:
    """A refusal for each text in nested tables and lists that holds a secret. Its value is not in it.

    Tables named ``env``, and entries of Kubernetes' ``env`` lists, are judged by the names of their variables, too.
    """
    match content:
        case str():
            yield from _refusal(field, in_value(content))
        case {"name": str(name), "value": value}:
            yield from _refusal(f"{field}.{name}", in_variable(name, value))
        case Mapping():
            variables = field.rpartition(".")[2] == "env"
            for name, value in content.items():
                inner = f"{field}.{name}" if field else str(name)
                reason = in_variable(str(name), value) if variables and not isinstance(value, Mapping | list) else ""
                yield from _refusal(inner, reason) if reason else found(value, inner)
                yield from _refusal(f"{field} (a name in it)".strip(), in_value(str(name)))
        case Sequence():
            for place, value in enumerate(content):
                yield from found(value, f"{field}[{place}]")


def _refusal(field: str, reason: str) -> Iterator[ConfigError]:
    if reason:
        yield ConfigError(field, HIDDEN, f"{reason}, in clear text", WAY_OUT)


def refuse(content: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first secret."""
    for error in found(content):
        raise error
