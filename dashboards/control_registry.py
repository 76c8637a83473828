"""A run takes orders from the process that runs it. A server in another process passes them on, over the API of that one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import requests

from dashboards.access import LOOPBACK
from fleet.errors import ConfigError

ANSWER_S = 5.0


class RunGone(Exception):
    """The process that ran the run is not there any more, or does not take orders for it."""


class OrderRefused(ConfigError):
    """What the other process said, word for word."""

    def __str__(self) -> str:
        return str(self.reason)


class ControlRegistry:
    """Which server of this machine takes the orders of which run: a note for each, under the folder's own name for it.

    Args:
        folder: private to the owner of the runs: whoever can write in it would be given the token.
        token: the write token, which all servers of a folder of runs have in common.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self._folder, self._token = folder, token

    def add(self, run: str, url: str) -> None:
        """Run ``run`` takes its orders at ``url``."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        note = self._folder / f".{run}.{os.getpid()}"
        note.write_text(json.dumps({"url": url}))
        note.replace(self._note(run))

    def remove(self, run: str) -> None:
        self._note(run).unlink(missing_ok=True)

    def port(self, run: str) -> DistantChaos | None:
        """The chaos of ``run`` in another process; None when nobody said that it has it, or not on this machine."""
        try:
            url = str(json.loads(self._note(run).read_text())["url"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return DistantChaos(f"{url}/api/runs/{quote(run)}/chaos", self._token) if urlsplit(url).hostname in LOOPBACK else None

    def _note(self, run: str) -> Path:
        return self._folder / f"{run}.json"


class DistantChaos:
    """A ``dashboards.server.ChaosPort`` over HTTP. Each method may also raise Gone."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {token}"}

    def order(self, asked: Mapping[str, Any]) -> str:
        return str(self._asked("POST", dict(asked))["said"])

    def status(self) -> dict[str, Any]:
        return self._asked("GET", None)

    def _asked(self, method: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            answer = requests.request(method, self._url, json=body, headers=self._headers, timeout=ANSWER_S)
            content = answer.json()
        except (requests.RequestException, ValueError) as error:
            raise RunGone(type(error).__name__) from error
        if not isinstance(content, dict):
            raise RunGone("no answer of Fleet's")
        if answer.status_code == 400:
            raise OrderRefused(str(content.get("field", "")), "", str(content.get("detail", "refused")))
        if not answer.ok:
            raise RunGone(f"status {answer.status_code}")
        return content
