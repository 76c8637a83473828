"""``fleet run`` tries a script before it starts anything else: when it does, how long it waits, and the lines that it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.rank.script import Script
from fleet.app.plans import RunPlan

ALONE_S = 3.0
"""Seconds in which nothing else is started. By then a small script has shown its faults, and no other process has to be ended."""
LIMIT_S = 20.0
"""Seconds after which the trial is given up. A local cluster takes 5 to 10 s to start, and a trial beside that costs no time. A run may
wait for twice of that."""
Wait = Callable[[float], None]


@contextmanager
def tried_first(plan: RunPlan, joins: bool, clock: Callable[[], float], say: Callable[[str], None]) -> Iterator[Wait]:
    """One process takes two steps of the plan's script meanwhile.

    Gives a function that waits for the trial, up to so many seconds from now on. With ``LIMIT_S`` the trial is over after it, or given up.
    The function raises ConfigError for a script that is wrong, and says why a trial tells nothing.

    Args:
        joins: the run will be on a cluster of other machines.
        clock: seconds that do not go back.
        say: takes a line.
    """
    if (ranks := plan.settings.replica_ranks) > 1:
        say(f"the script is not tried first: its ranks belong together in groups of {ranks}, and one process is none")
        yield lambda limit_s: None
        return
    from actors.first_steps import FirstSteps

    assert isinstance(plan.train, Script)
    began_s = clock()
    with FirstSteps(plan.train, plan.settings, joins) as steps:

        def wait(until_s: float) -> None:
            if steps.wait(began_s + until_s - clock()):
                if steps.why_unknown:
                    say(f"the script could not be tried first: {steps.why_unknown}")
                    steps.why_unknown = ""
            elif until_s >= LIMIT_S:
                say(f"two steps of the script take longer than {LIMIT_S:g} s in one process: it is not tried first")
                steps.close()

        yield wait
