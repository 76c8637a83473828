"""Puts Fleet's data source, folder, dashboards and alerts into a Grafana, over its HTTP API. May be repeated at any time.

A dashboard that somebody changed after it was pushed is left alone, and said so; so is one of the same uid that Fleet did not push. Who
changed it last is known from the message of Grafana's newest version of it: what Grafana gives back differs from what was pushed in ways of
its own (defaults, migrations), so that comparing contents would either miss a person's change or take Grafana's for one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
from grafana_api.grafana_api import GrafanaClientError, GrafanaException, GrafanaServerError
from grafana_api.grafana_face import GrafanaFace

from dashboards.grafana.alerts import GROUP, rule_group, stamps_of
from dashboards.grafana.boards import FOLDER_TITLE, FOLDER_UID, SOURCE_UID, all_boards, stamp_of
from fleet.errors import ConfigError, RunFailed

SOURCE_NAME = "Fleet Prometheus"
CREATED, UPDATED, UNCHANGED, LEFT_ALONE = "created", "updated", "unchanged", "left alone: it was changed since it was pushed"
NOT_OURS = "left alone: another dashboard has this uid"
OTHERS_RULES = "left alone: their group has a rule that Fleet did not push"
RULES = f"/v1/provisioning/folder/{FOLDER_UID}/rule-groups/{GROUP}"
T = TypeVar("T")


def connect(url: str, token: str, timeout_s: float = 10.0) -> GrafanaFace:
    """A client for the Grafana at ``url``, such as ``https://grafana.example/sub``. Raises ConfigError when that is no URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("--grafana", url, "is not the URL of a Grafana", "Write http://HOST:3000 or https://HOST/PATH.")
    if not token:
        raise ConfigError("GRAFANA_TOKEN", "", "is not set", "Make a service account token in Grafana, and put it in that variable.")
    path = f"{parts.path.strip('/')}/" if parts.path.strip("/") else ""
    return GrafanaFace(token, parts.hostname, parts.port, path, parts.scheme, timeout=timeout_s)


def push(grafana: GrafanaFace, prometheus_url: str) -> dict[str, str]:
    """Data source, folder, dashboards and alerts; what became of each.

    Raises:
        RunFailed: Grafana cannot be reached, refuses the token, or fails; nothing is half done that a second push does not finish.
    """
    source = _asked("the data source", lambda: _source(grafana, prometheus_url))
    _asked("the folder", lambda: _folder(grafana))
    done = {}
    for model in all_boards(source):
        done[model["title"]] = _asked(f"dashboard {model['uid']}", functools.partial(_dashboard, grafana, model))
    done["Alerts"] = _asked("the alerts", lambda: _alerts(grafana, rule_group(source)))
    return done


def _asked(what: str, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except GrafanaException as error:
        raise RunFailed(f"Grafana did not take {what}: {_advice(error)}", str(error)) from error
    except (requests.exceptions.JSONDecodeError, LookupError, TypeError, ValueError) as error:
        way_out = "Does a page to log in stand before it? Give the URL under which it answers tokens."
        raise RunFailed(f"another program than Grafana answers for {what}: no JSON of Grafana's. {way_out}") from error
    except requests.RequestException as error:
        reason = f"Grafana cannot be reached for {what}: {type(error).__name__}. Is the URL right, and does it run?"
        raise RunFailed(reason) from error


def _advice(error: GrafanaException) -> str:
    if isinstance(error, GrafanaServerError):
        return f"it failed itself ({error.status_code}); push again when it is well"
    words = {
        401: "the token in GRAFANA_TOKEN is wrong or has run out",
        403: "the token may not do that; it needs the role Editor, and Admin for a new data source",
        404: "it has no such thing; Grafana 9 or newer is needed",
        412: "somebody saved it at the same time; push again",
    }
    return words.get(error.status_code, f"it answered {error.status_code}")


def _found(ask: Callable[[], T]) -> T | None:
    """What is there, None when it is not."""
    try:
        return ask()
    except GrafanaClientError as error:
        if error.status_code == 404:
            return None
        raise


def _source(grafana: GrafanaFace, url: str) -> str:
    """The uid of the data source; one that is there is used as it is."""
    there = _found(lambda: grafana.datasource.get_datasource_by_name(SOURCE_NAME.replace(" ", "%20")))
    if there is not None:
        return str(there["uid"])
    wanted = {"name": SOURCE_NAME, "type": "prometheus", "access": "proxy", "url": url, "uid": SOURCE_UID}
    try:
        grafana.datasource.create_datasource(wanted)
    except GrafanaClientError as error:
        if error.status_code != 409:  # made by somebody else a moment ago
            raise
    return SOURCE_UID


def _folder(grafana: GrafanaFace) -> None:
    if _found(lambda: grafana.folder.get_folder(FOLDER_UID)) is None:
        try:
            grafana.folder.create_folder(FOLDER_TITLE, FOLDER_UID)
        except GrafanaClientError as error:
            if error.status_code not in (409, 412):
                raise


def _dashboard(grafana: GrafanaFace, model: dict[str, Any]) -> str:
    """``version`` is that of the dashboard that was looked at, so that Grafana refuses (412) when somebody saved it meanwhile."""
    there = _found(lambda: grafana.dashboard.get_dashboard(model["uid"]))
    if there is None:
        _save(grafana, model, 0)
        return CREATED
    old = there["dashboard"]
    stamp = stamp_of(old)
    if stamp is None:
        return NOT_OURS
    if _newest_message(grafana, model["uid"]) != _message(stamp):
        return LEFT_ALONE
    if stamp == stamp_of(model):
        return UNCHANGED
    _save(grafana, model, int(old["version"]))
    return UPDATED


def _alerts(grafana: GrafanaFace, wanted: dict[str, Any]) -> str:
    """Grafana lets no person change rules that came this way; a rule that a person has added to the group would be lost."""
    there: dict[str, Any] = _found(lambda: grafana.dashboard.api.GET(RULES)) or {"rules": []}
    stamps = stamps_of(there)
    if "" in stamps:
        return OTHERS_RULES
    if stamps == stamps_of(wanted) and len(there["rules"]) == len(wanted["rules"]):
        return UNCHANGED
    grafana.dashboard.api.PUT(RULES, json=wanted)
    return UPDATED if stamps else CREATED


def _message(stamp: str | None) -> str:
    return f"fleet dashboard push, content {stamp}"


def _newest_message(grafana: GrafanaFace, uid: str) -> str:
    """What was said when the dashboard was last saved. The client has no call for it; older Grafanas give a list, newer an object."""
    found = grafana.dashboard.api.GET(f"/dashboards/uid/{uid}/versions?limit=1")
    versions = found["versions"] if isinstance(found, dict) else found
    newest: dict[str, Any] = max(versions, key=lambda each: int(each["version"]), default={})
    return str(newest.get("message", ""))


def _save(grafana: GrafanaFace, model: dict[str, Any], version: int) -> None:
    content = {**model, "id": None, "version": version}
    message = _message(stamp_of(model))
    grafana.dashboard.update_dashboard({"dashboard": content, "folderUid": FOLDER_UID, "message": message, "overwrite": False})
