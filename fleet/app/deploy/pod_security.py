"""Kubernetes' Pod Security Standards at the level ``restricted``, as of a pod's template. Pure.

No schema has them: an API server asks them of pods in a namespace with the label ``pod-security.kubernetes.io/enforce``.
Source: https://kubernetes.io/docs/concepts/security/pod-security-standards, of Kubernetes 1.33, for pods of Linux.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fleet.app.deploy.rules import MISSING, Good, Keys, Rule, broken, one_of, reached, shown
from fleet.errors import ConfigError

KINDS = ("containers", "initContainers", "ephemeralContainers")
LEVEL = "the Pod Security level restricted asks for it"
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret", "image"}
SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start", "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
}  # fmt: skip
SELINUX = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
PROFILES = ("RuntimeDefault", "Localhost")
OFF = one_of(False)


def refused(template: Mapping[str, Any]) -> Iterator[ConfigError]:
    """The level's refusals of a pod's template, by their paths."""
    yield from broken(template, POD)
    for kind in KINDS:
        for path, container in reached(template, ["spec", kind, "*"]):
            if not isinstance(container, Mapping):
                continue
            for error in (*broken(container, CONTAINER), *_inherited(template, container)):
                yield ConfigError(f"{path}.{error.field}", error.value, error.reason, error.way_out)


def _inherited(template: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Refusals of fields that stand in the pod or in each container. The container's value counts where it has one."""
    for words, good, takes in (
        (["runAsNonRoot"], one_of(True), "true"),
        (["seccompProfile", "type"], one_of(*PROFILES), "RuntimeDefault, or Localhost"),
    ):
        own = dict(reached(container, ["securityContext", *words]))
        above = dict(reached(template, ["spec", "securityContext", *words]))
        value = next((each for each in (*own.values(), *above.values()) if each is not MISSING), "")
        if not good(value):
            at = f"securityContext.{'.'.join(words)}"
            yield ConfigError(at, shown(value), f"it takes {takes}, here or in the pod's securityContext: {LEVEL}")


def _only(known: Collection[str]) -> Good:
    """A list of some of these."""
    return lambda value: isinstance(value, list) and all(isinstance(each, str) and each in known for each in value)


def _drops_all(value: Any) -> bool:
    return isinstance(value, list) and "ALL" in value


def _allowed_volume(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(VOLUMES & value.keys()) and not value.keys() - VOLUMES - {"name"}


def _not_root(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _context(at: str) -> tuple[Rule, ...]:
    """Refusals of each ``securityContext``."""
    return (
        Rule(f"{at} runAsUser", _not_root, f"a user's number above 0: {LEVEL}", "", False),
        Rule(f"{at} windowsOptions hostProcess", OFF, f"false: {LEVEL}", "", False),
        Rule(f"{at} seLinuxOptions type", one_of(*SELINUX), f"a container's type: {LEVEL}", "", False),
        Rule(f"{at} seLinuxOptions user", one_of(""), f"nothing: {LEVEL}", "", False),
        Rule(f"{at} seLinuxOptions role", one_of(""), f"nothing: {LEVEL}", "", False),
        Rule(f"{at} appArmorProfile type", one_of(*PROFILES), f"RuntimeDefault or Localhost: {LEVEL}", "", False),
    )


POD: tuple[Rule | Keys, ...] = (
    *(Rule(f"spec {name}", OFF, f"false: {LEVEL}", "", False) for name in ("hostNetwork", "hostPID", "hostIPC")),
    Rule("spec volumes *", _allowed_volume, f"a volume of no host: {LEVEL}", f"One of {', '.join(sorted(VOLUMES))}.", False),
    Rule("spec securityContext sysctls * name", one_of(*SYSCTLS), f"a sysctl of the pod alone: {LEVEL}", "", False),
    *_context("spec securityContext"),
)
PROBES = [f"{name} {way} host" for name in ("livenessProbe", "readinessProbe", "startupProbe") for way in ("httpGet", "tcpSocket")]
HOOKS = [f"lifecycle {name} {way} host" for name in ("postStart", "preStop") for way in ("httpGet", "tcpSocket")]
CONTAINER: tuple[Rule | Keys, ...] = (
    Rule("securityContext allowPrivilegeEscalation", OFF, f"false: {LEVEL}"),
    Rule("securityContext capabilities drop", _drops_all, f'["ALL"]: {LEVEL}'),
    Rule("securityContext capabilities add", _only(("NET_BIND_SERVICE",)), f"NET_BIND_SERVICE or nothing: {LEVEL}", "", False),
    Rule("securityContext privileged", OFF, f"false: {LEVEL}", "", False),
    Rule("securityContext procMount", one_of("Default"), f"Default: {LEVEL}", "", False),
    Rule("ports * hostPort", one_of(0), f"0: {LEVEL}", "", False),
    *(Rule(each, one_of(""), f"nothing: {LEVEL}", "", False) for each in (*PROBES, *HOOKS)),
    *_context("securityContext"),
)
