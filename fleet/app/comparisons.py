"""Two policies on the same faults: simulated, or in recorded runs. Imports neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fleet.app.plans import find_run
from fleet.app.scenarios import Scenario, prepare
from fleet.errors import ConfigError
from fleet.host.journal import read_journal
from fleet.ledger.goodput import Ledger
from fleet.ledger.summary import LedgerSummary
from fleet.simulation.compare import MOST_PAIRS, PairedVerdict, Sequential, compare
from fleet.simulation.fleet_model import Partial
from policies.recovery import RECOVERIES


def recovery_of(name: str) -> str:
    """``restart`` of ``restart:daly``."""
    return name.partition(":")[0]


def interval_of(name: str) -> str:
    """``daly`` of ``restart:daly``; ``exact`` where none is named."""
    return name.partition(":")[2] or "exact"


def check_policies(names: Sequence[str]) -> list[str]:
    """``names``, once each. Raises ConfigError for an unknown one, or fewer than two."""
    for name in names:
        if recovery_of(name) not in RECOVERIES:
            raise ConfigError("policies", name, "unknown", f"Known: {', '.join(RECOVERIES)}, each with :INTERVAL if wanted.")
    if len(set(names)) < 2:
        raise ConfigError(
            "policies", " ".join(names), "two different ones are needed", "For example: fleet experiment compare in-place restart."
        )
    return list(dict.fromkeys(names))


def runs_named(names: Sequence[str], storage: Path) -> list[Path]:
    """The folders of the runs, where ``names`` are two or more runs and no policies; else none.

    Raises ConfigError when one name is a run and another one is not.
    """
    if len(names) < 2 or any(recovery_of(name) in RECOVERIES for name in names):
        return []
    there = [(storage / name / "journal.jsonl").is_file() or (Path(name) / "journal.jsonl").is_file() for name in names]
    return [find_run(name, storage) for name in names] if any(there) else []


def of_simulated(
    first: Scenario, second: Scenario, pairs: int, seed: int, alpha: float, least: float, report_to: Callable[[int], None], partial: Partial
) -> PairedVerdict:
    """Run both on one trace after another, until the test decides, ``pairs`` are used up, or ``partial`` says stop."""
    if pairs < 1:
        raise ConfigError("pairs", pairs, "must be at least 1", "The nearest valid value is 1.")
    one, other = prepare(first), prepare(second)

    def goodputs() -> Iterator[tuple[float, float]]:
        for number in range(pairs):
            if number and partial.stop:
                return
            arrivals = one.arrivals(seed + number)
            yield one.run(arrivals).goodput, other.run(arrivals).goodput
            report_to(number + 1)

    return _verdict(goodputs(), Sequential(alpha, least=least))


def _verdict(pairs: Iterable[tuple[float, float]], test: Sequential) -> PairedVerdict:
    """The last verdict, with the number of pairs that would decide where these do not."""
    return replace(list(compare(pairs, test))[-1], would_decide=test.would_decide())


def complete(found: Mapping[str, PairedVerdict], wanted: Sequence[str], pairs: int) -> bool:
    """Whether each of ``wanted`` was compared until it was decided, or with as many pairs as were allowed."""
    return all(name in found and (found[name].decided or found[name].pairs >= pairs) for name in wanted)


def of_recorded(texts: Sequence[str], storage: Path, alpha: float, least: float, training: bool = False) -> PairedVerdict:
    """Compare the goodput of recorded runs, pair by pair; with ``training``, without start-up and end.

    Raises ConfigError when a text names no pair, or its runs were not to meet the same faults.
    """
    found = []
    for text in texts:
        names = [name.strip() for name in text.split(",")]
        if len(names) != 2 or names[0] == names[1]:
            raise ConfigError("--recorded", text, "not two different runs joined by a comma", "Write --recorded FIRST,SECOND.")
        one, other = (_summary(find_run(name, storage)) for name in names)
        _check_pair(text, one, other)
        found.append((one.training_goodput, other.training_goodput) if training else (one.goodput, other.goodput))
    return _verdict(found, Sequential(alpha, least=least))


def _summary(folder: Path) -> LedgerSummary:
    return Ledger().apply_all(read_journal(folder / "journal.jsonl")).summary()


def _check_pair(text: str, one: LedgerSummary, other: LedgerSummary) -> None:
    """Raises ConfigError when the planned faults of both differ: then the comparison would measure luck."""
    planned = [
        sorted((i.id, i.kind) for i in each.incidents if any(phase == "planned" for phase, _, _ in i.phases)) for each in (one, other)
    ]
    if planned[0] != planned[1]:
        reason = f"they were not to meet the same faults: {len(planned[0])} and {len(planned[1])} were planned"
        raise ConfigError("--recorded", text, reason, "Make both runs with the same --chaos and --seed.")


def sentence(first: str, second: str, verdict: PairedVerdict, alpha: float) -> str:
    """The verdict in words."""
    words = {
        "first": f"{first} loses less than {second}", "second": f"{second} loses less than {first}",
        "same": f"{first} and {second} lose the same", "": f"not decided between {first} and {second}",
    }[verdict.decided]  # fmt: skip
    interval = f"{100 * verdict.low:+.2f} to {100 * verdict.high:+.2f}"
    sure = f"{100 * (1 - alpha):.3g}%"
    student = f"; Student's interval, for a number fixed beforehand: {100 * verdict.fixed_low:+.3f} to {100 * verdict.fixed_high:+.3f}"
    return (
        f"{words}: {100 * verdict.mean:+.3f} points of goodput over {verdict.pairs} pairs, {interval} with {sure} at any time"
        + (student if verdict.pairs > 1 else "") + _wanted(verdict)
    )  # fmt: skip


def _wanted(verdict: PairedVerdict) -> str:
    """How many pairs would decide, in words; empty where it is decided."""
    if verdict.decided:
        return ""
    if verdict.pairs < 2:
        return "; one pair does not tell how many would decide"
    count = f"more than {MOST_PAIRS:,}" if verdict.would_decide is None else f"about {verdict.would_decide:,}"
    return f"; {count} pairs would decide, if they differ as these do"
