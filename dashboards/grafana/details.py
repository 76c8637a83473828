"""Boards for whoever looks for the reason: ranks, checkpoints, chaos. Those that people look at first are in ``first.py``."""

from __future__ import annotations

from dashboards.grafana.parts import BARS, BYTES, COUNT, RUN, SECONDS, SHARE, Board, Panel, lines

RANKS = Board(
    "fleet-ranks",
    "Fleet: ranks and nodes",
    links=("fleet-run",),
    rows={
        "Membership": (
            lines(
                "Ranks",
                "How many train, how many stand by?",
                COUNT,
                (f"fleet_view_size{{{RUN}}}", "in the view"),
                (f"fleet_spares{{{RUN}}}", "spares"),
                (f"fleet_world_size{{{RUN}}}", "wanted"),
            ),
            lines(
                "Views and losses",
                "How often does membership change?",
                COUNT,
                (f"fleet_views_total{{{RUN}}}", "views"),
                (f"fleet_losses_total{{{RUN}}}", "processes lost"),
                (f"fleet_worst_slot_losses_total{{{RUN}}}", "of the worst slot"),
            ),
            lines("Ranks on each node", "Who is where?", COUNT, (f"fleet_node_ranks{{{RUN}}}", "{{node}}"), stacked=True),
            lines("Decisions", "What does Fleet do about it?", COUNT, (f"fleet_decisions_total{{{RUN}}}", "{{policy}} {{action}}")),
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
            lines("Step", "How long is a step?", SECONDS, (f"fleet_step_median_seconds{{{RUN}}}", "median")),
            lines("Memory", "How much room is left on a host?", BYTES, (f"fleet_memory_peak_bytes{{{RUN}}}", "slot {{slot}}")),
            lines("Memory of the GPU", "And on a GPU?", BYTES, (f"fleet_device_memory_peak_bytes{{{RUN}}}", "slot {{slot}}")),
            lines("Sent", "What does the network carry?", BYTES, (f"fleet_sent_bytes_total{{{RUN}}}", "slot {{slot}}")),
            lines(
                "Exchange that is hidden",
                "How much of the exchange costs no time?",
                SECONDS,
                (f"fleet_exchange_hidden_seconds_total{{{RUN}}}", "slot {{slot}}"),
            ),
        ),
        "The ledger": (
            lines(
                "Taken back",
                "How much of what looked like progress was not?",
                SECONDS,
                (f"fleet_reclassified_rank_seconds_total{{{RUN}}}", "{{category}}"),
            ),
            lines(
                "Not decided yet",
                "How far is the ledger behind, and what did nobody record?",
                SECONDS,
                (f"fleet_pending_rank_seconds{{{RUN}}}", "pending"),
                (f"fleet_other_ratio{{{RUN}}} * fleet_wall_seconds{{{RUN}}}", "recorded by nobody"),
            ),
            lines(
                "Without machines",
                "How long did it wait for room, and how long was it stopped?",
                SECONDS,
                (f"fleet_queued_seconds{{{RUN}}}", "queued"),
                (f"fleet_down_seconds{{{RUN}}}", "stopped"),
            ),
            lines(
                "Connections refused",
                "Who comes that does not belong to the run?",
                COUNT,
                (f"fleet_refused_lines_total{{{RUN}}}", "{{listener}} {{reason}}"),
            ),
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
            lines("Written", "Do they succeed?", COUNT, (f"fleet_checkpoints_total{{{RUN}}}", "{{phase}}")),
            lines("Blocked", "What does saving cost the loop?", SECONDS, (f"fleet_checkpoint_blocked_seconds{{{RUN}}}", "blocked")),
            lines(
                "Until durable", "How long until one can be relied on?", SECONDS, (f"fleet_checkpoint_latency_seconds{{{RUN}}}", "latency")
            ),
            lines("Size", "How much is written?", BYTES, (f"fleet_checkpoint_bytes{{{RUN}}}", "bytes")),
            lines(
                "Steps at risk",
                "How many steps would be done again?",
                COUNT,
                (f"fleet_step{{{RUN}}} - fleet_checkpoint_step{{{RUN}}}", "steps"),
            ),
            lines(
                "Rank-seconds stalled",
                "And in the ledger?",
                SECONDS,
                (f'fleet_rank_seconds_total{{{RUN},category=~"checkpoint_stall|restore"}}', "{{category}}"),
            ),
        ),
        "Copies in memory": (
            lines("Made", "Could we go on from memory?", COUNT, (f"fleet_peer_copies_total{{{RUN}}}", "{{phase}}")),
            lines(
                "Interval",
                "How far would the loss of all ranks set us back?",
                SECONDS,
                (f"fleet_peer_copy_interval_seconds{{{RUN}}}", "interval"),
            ),
        ),
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
            Panel(
                "Cost by component",
                "Which component costs most?",
                ((f"sum by (component) (fleet_fault_cost_rank_seconds{{{RUN}}})", "{{component}}"),),
                SECONDS,
                BARS,
            ),
            Panel(
                "Cost by category",
                "And in which way?",
                ((f"sum by (category) (fleet_fault_cost_rank_seconds{{{RUN}}})", "{{category}}"),),
                SECONDS,
                BARS,
            ),
            lines(
                "Goodput under chaos",
                "Does it hold its goodput?",
                SHARE,
                (f"fleet_goodput_ratio{{{RUN}}}", "measured"),
                (f"fleet_predicted_goodput_ratio{{{RUN}}}", "predicted"),
                (f"fleet_ettr_ratio{{{RUN}}}", "ETTR"),
                (f"fleet_scheduling_goodput_ratio{{{RUN}}}", "with spares"),
            ),
            lines("Ranks in training", "How fast does the world recover?", COUNT, (f"fleet_view_size{{{RUN}}}", "in the view")),
            lines(
                "Generation and history",
                "Was anything rolled back?",
                COUNT,
                (f"fleet_view_generation{{{RUN}}}", "generation"),
                (f"fleet_history{{{RUN}}}", "history"),
            ),
        ),
        "What will come": (
            lines(
                "Goodput while training",
                "And what is to be expected of it?",
                SHARE,
                (f"fleet_training_goodput_ratio{{{RUN}}}", "measured"),
                (f"fleet_forecast_goodput_ratio{{{RUN}}}", "ahead, {{bound}}"),
            ),
            lines("Faults ahead", "How many will come?", COUNT, (f"fleet_forecast_faults{{{RUN}}}", "{{bound}}")),
            lines(
                "Faults a second",
                "Which kind of fault is to be expected?",
                COUNT,
                (f'fleet_forecast_fault_rate_per_second{{{RUN},bound="mean"}}', "{{kind}}"),
            ),
            lines("Forecasts", "Are they right as often as they say?", COUNT, (f"fleet_forecasts_total{{{RUN}}}", "{{truth}}")),
        ),
        "Slow ranks": (
            lines(
                "Slowdowns",
                "Are slow ranks found?",
                COUNT,
                (f"fleet_slowdowns_injected_total{{{RUN}}}", "injected"),
                (f"fleet_slowdowns_found_total{{{RUN}}}", "found"),
            ),
            lines("Accusations", "Is only who is slow said to be?", COUNT, (f"fleet_accusations_total{{{RUN}}}", "right: {{right}}")),
        ),
    },
)
