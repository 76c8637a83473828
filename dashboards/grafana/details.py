"""The board for whoever looks for the reason: ranks, checkpoints, chaos. Those that people look at first are in ``first.py``.

Each metric that no board asks for has a panel of its own below, as the table of metrics has it: see ``panels.py``.
"""

from __future__ import annotations

from dashboards.grafana.parts import BARS, COUNT, RUN, SECONDS, SHARE, Board, Panel, lines

DETAILS = Board(
    "fleet-details",
    "Fleet: ranks, checkpoints, chaos",
    links=("fleet-run",),
    rows={
        "Ranks": (
            *(
                lines(
                    f"Share of time spent {what}",
                    question,
                    SHARE,
                    (f'rate(fleet_slot_seconds{{{RUN},part="{part}"}}[$__rate_interval])', "slot {{slot}}"),
                )
                for what, part, question in (
                    ("computing", "compute", "Which rank is slow?"),
                    ("waiting in a step", "wait", "Which ranks wait for it?"),
                )
            ),
            Panel("Time lost", "Which slot loses time?", ((f'fleet_slot_seconds{{{RUN},part="lost"}}', "slot {{slot}}"),), SECONDS, BARS),
        ),
        "Checkpoints": (
            lines(
                "Age of the newest",
                "How much is at risk?",
                SECONDS,
                (f"time() - fleet_checkpoint_timestamp_seconds{{{RUN}}}", "age"),
                (f"fleet_checkpoint_interval_seconds{{{RUN}}}", "interval"),
            ),
            lines(
                "Steps at risk",
                "How many steps would be done again?",
                COUNT,
                (f"fleet_step{{{RUN}}} - fleet_checkpoint_step{{{RUN}}}", "steps"),
            ),
        ),
        "Chaos": (
            lines(
                "Faults",
                "What was planned, executed, suppressed, healed?",
                COUNT,
                (f"fleet_faults_total{{{RUN}}} > 0", "{{kind}} {{phase}}"),
            ),
            *(
                Panel(
                    f"Cost by {label}",
                    question,
                    ((f"sum by ({label}) (fleet_fault_cost_rank_seconds{{{RUN}}})", f"{{{{{label}}}}}"),),
                    SECONDS,
                    BARS,
                )
                for label, question in (("component", "Which component costs most?"), ("category", "And in which way?"))
            ),
        ),
    },
)
