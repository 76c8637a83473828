"""``fleet run`` tries a script before it starts anything for it: what is left out, how long that is waited for, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.rank.script import Script
from fleet.app.plans import RunPlan

ALONE_S = 3.0
"""So long nothing else is started: a small script has shown by then what is wrong, and nothing has to be ended for it."""
LIMIT_S = 20.0
"""Then it is given up. A cluster of this machine takes 5 to 10 s to start, and a trial beside that costs the run nothing; twice of that
is as much as a run may wait for it."""
Wait = Callable[[float], None]


@contextmanager
def tried_first(plan: RunPlan, joins: bool, clock: Callable[[], float], say: Callable[[str], None]) -> Iterator[Wait]:
    """Two steps of the plan's script are taken by one process meanwhile.

    Gives what waits for it, up to so many seconds from now on. With ``LIMIT_S`` it is over then, or given up. It raises ConfigError for a
    script that is wrong, and says why a trial tells nothing.

    Args:
        joins: the run is to be on a cluster of other machines.
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
