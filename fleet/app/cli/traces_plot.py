"""The pictures of ``fleet experiment fit --plot``: faults over time, times between them and their laws, repairs, faults of each node."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleet.errors import ConfigError
from fleet.host.extras import need

if TYPE_CHECKING:
    from fleet.planning.traces.fit import Lives, TraceFit
    from fleet.planning.traces.lives import Floats

FORMS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Raises ConfigError where no picture can be drawn, before anything is read."""
    if path.suffix.lower() not in FORMS:
        raise ConfigError("--plot", str(path), "is no form of picture that is drawn", f"End its name with one of {', '.join(FORMS)}.")
    need("matplotlib", "traces", "--plot", str(path))


def draw(fit: TraceFit, path: Path) -> None:
    """Four pictures in one file. Raises ConfigError where it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    _over_time(fit, axes[0][0])
    _lives(fit.between["all"], _seen(fit), axes[0][1], "Time between faults of a node" if fit.of_nodes else "Time between faults")
    repairs = np.array([entry.repair_s for entry in fit.log.entries if entry.repair_s is not None])
    _lives(fit.repairs, (repairs, np.ones(len(repairs))), axes[1][0], "Time of repair")
    _of_nodes(fit, axes[1][1])
    figure.suptitle(f"{fit.source}: {len(fit.log.entries):,} faults of {fit.log.nodes:,} nodes", parse_math=False)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError("--plot", str(path), f"cannot be written: {error.strerror}") from error


def _seen(fit: TraceFit) -> tuple[Floats, Floats]:
    from fleet.planning.traces.fit import times_between

    entries = [entry for entry in fit.log.entries if entry.node or not fit.of_nodes]
    lives, seen, _ = times_between(entries, fit.log, fit.of_nodes)
    return lives, seen


def _over_time(fit: TraceFit, axis: Any) -> None:
    for rate in fit.rates[:6]:
        times = sorted(entry.at_s for entry in fit.log.entries if entry.component == rate.component)
        when = [datetime.fromtimestamp(at_s, UTC) for at_s in times] if times[0] > 1e8 else times
        axis.step(when, np.arange(1, len(times) + 1), where="post", label=f"{rate.component} ({rate.faults:,})")
    axis.set_title("Faults until then")
    axis.legend(fontsize=8)


def _lives(lives: Lives | None, data: tuple[Floats, Floats], axis: Any, title: str) -> None:
    """Share that lasted longer: what was seen (Kaplan and Meier), and each law."""
    from scipy import stats

    from fleet.planning.traces.lives import LAWS

    axis.set_title(title)
    times, seen = data
    if lives is None or not lives.laws:
        axis.text(0.5, 0.5, "too few to say", ha="center", va="center", transform=axis.transAxes)
        return
    kept = stats.ecdf(stats.CensoredData.right_censored(times, seen == 0)).sf
    axis.step(kept.quantiles / 3600.0, kept.probabilities, where="post", color="black", label="seen")
    grid = np.geomspace(max(times.min(), 1.0), times.max(), 200)
    for law in lives.laws:
        first, second = (1.0, *(value for value, _, _ in law.parameters.values()))[-2:]
        axis.plot(grid / 3600.0, LAWS[law.law].of(first, second).sf(grid), label=f"{law.law}, distance {law.distance:.3f}")
    axis.set_xscale("log")
    axis.set_xlabel("hours")
    axis.set_ylabel("share that lasted longer")
    axis.legend(fontsize=8)


def _of_nodes(fit: TraceFit, axis: Any) -> None:
    counts = Counter(entry.node for entry in fit.log.entries if entry.node)
    axis.set_title("Faults of each node, the most first; repeat offenders in red")
    if not counts:
        axis.text(0.5, 0.5, "nodes are not named", ha="center", va="center", transform=axis.transAxes)
        return
    ranked = counts.most_common(200)
    bad = {each.node for each in fit.offenders.nodes}
    axis.bar(range(len(ranked)), [count for _, count in ranked], color=["tab:red" if node in bad else "tab:blue" for node, _ in ranked])
    axis.set_xlabel("nodes")
