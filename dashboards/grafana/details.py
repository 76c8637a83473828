"""Boards for whoever looks for the reason: ranks, checkpoints, chaos. Those that people look at first are in ``first.py``.

Most panels show a metric as the table of metrics has it.
"""

from __future__ import annotations

from dashboards.grafana.parts import BARS, COUNT, RUN, SECONDS, SHARE, Board, Panel, drawn, lines

RANKS = Board(
    "fleet-ranks",
    "Fleet: ranks and nodes",
    links=("fleet-run",),
    rows={
        "Membership": drawn(
            ("fleet_view_size", "fleet_spares", "fleet_world_size"),
            ("fleet_views_total", "fleet_losses_total", "fleet_worst_slot_losses_total"),
            ("fleet_node_ranks",),
            ("fleet_decisions_total",),
        ),
        "Ranks": (
            lines(
                "Share of time spent computing",
                "Which rank is slow?",
                SHARE,
                (f'rate(fleet_slot_seconds{{{RUN},part="compute"}}[$__rate_interval])', "slot {{slot}}"),
            ),
            lines(
                "Share of time spent waiting in a step",
                "Which ranks wait for it?",
                SHARE,
                (f'rate(fleet_slot_seconds{{{RUN},part="wait"}}[$__rate_interval])', "slot {{slot}}"),
            ),
            Panel("Time lost", "Which slot loses time?", ((f'fleet_slot_seconds{{{RUN},part="lost"}}', "slot {{slot}}"),), SECONDS, BARS),
            *drawn(
                ("fleet_step_median_seconds",),
                ("fleet_memory_peak_bytes",),
                ("fleet_device_memory_peak_bytes",),
                ("fleet_sent_bytes_total",),
                ("fleet_exchange_hidden_seconds_total",),
            ),
        ),
        "The ledger": drawn(
            ("fleet_reclassified_rank_seconds_total",),
            ("fleet_pending_rank_seconds",),
            ("fleet_other_ratio",),
            ("fleet_queued_seconds", "fleet_down_seconds"),
            ("fleet_refused_lines_total",),
        ),
    },
)

CHECKPOINTS = Board(
    "fleet-checkpoints",
    "Fleet: checkpoints and storage",
    links=("fleet-run",),
    rows={
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
            *drawn(
                ("fleet_checkpoints_total",),
                ("fleet_checkpoint_blocked_seconds", "fleet_checkpoint_latency_seconds"),
                ("fleet_checkpoint_bytes",),
            ),
            lines(
                "Rank-seconds stalled",
                "And in the ledger?",
                SECONDS,
                (f'fleet_rank_seconds_total{{{RUN},category=~"checkpoint_stall|restore"}}', "{{category}}"),
            ),
        ),
        "Copies in memory": drawn(("fleet_peer_copies_total",), ("fleet_peer_copy_interval_seconds",)),
    },
)

CHAOS = Board(
    "fleet-chaos",
    "Fleet: chaos experiment",
    links=("fleet-run",),
    rows={
        "Faults": (
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
            *drawn(
                ("fleet_goodput_ratio", "fleet_predicted_goodput_ratio", "fleet_ettr_ratio", "fleet_scheduling_goodput_ratio"),
                ("fleet_view_size",),
                ("fleet_view_generation", "fleet_history"),
            ),
        ),
        "What will come": (
            *drawn(("fleet_training_goodput_ratio", "fleet_forecast_goodput_ratio"), ("fleet_forecast_faults",)),
            lines(
                "Faults a second",
                "Which kind of fault is to be expected?",
                COUNT,
                (f'fleet_forecast_fault_rate_per_second{{{RUN},bound="mean"}}', "{{kind}}"),
            ),
            *drawn(("fleet_forecasts_total",)),
        ),
        "Slow ranks": drawn(("fleet_slowdowns_injected_total", "fleet_slowdowns_found_total"), ("fleet_accusations_total",)),
    },
)
