"""Which tests run when: before each change (``make test``), before it lands (``.ci/run``), each night (``make nightly``).

A test is in the tier of the most specific line that names it: its parameters, the test, its file, a folder above it. What runs at night
alone is named here with the reason, by the part of ``make nightly`` that has it. ``pytest --tier NAME FILES`` runs the tests of one tier or
part, ``python -m tests.tiers NAME`` prints the files that it has tests in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TIERS: dict[str, tuple[str, ...]] = {
    "test": (
        "tests/unit", "tests/property", "tests/simulation", "tests/tidy", "tests/contract/test_checkpoint_store.py",
        "tests/contract/test_rank_machine.py", "tests/contract/test_peer_memory.py", "tests/zoo",
        "tests/contract/test_checkpoint_store.py::test_plain_pytorch_loads_it_in_a_process_that_cannot_import_fleet[1-file]",
        "tests/contract/test_checkpoint_store.py::test_plain_pytorch_loads_it_in_a_process_that_cannot_import_fleet[3-s3]",
        "tests/property/test_scale_fit.py::test_the_interval_of_the_held_out_world_holds_it_as_often_as_it_says[worlds0-2-8-0.01]",
        "tests/simulation/test_cuts.py::test_when_the_coordinator_is_cut_off_nothing_is_lost[3.0-go-on]",
        "tests/simulation/test_cuts.py::test_when_the_coordinator_is_cut_off_nothing_is_lost[0.3-stall]",
        ("tests/unit/test_first_steps.py::test_where_nothing_can_be_told_the_run_goes_on_and_nothing_was_changed"
         "[open({outside!r}, 'w')-it changes {outside}]"),
        ("tests/unit/test_first_steps.py::test_where_nothing_can_be_told_the_run_goes_on_and_nothing_was_changed"
         "[raise MemoryError-it does not fit into the memory of one process here]"),
        "tests/unit/test_extending.py::test_an_example_works_and_takes_as_many_files_as_it_says[A metric]",
        "tests/unit/test_extending.py::test_an_example_works_and_takes_as_many_files_as_it_says[A layout of the state]",
        "tests/unit/test_folding.py::test_a_journal_grows_by_so_much_and_its_old_part_by_next_to_nothing[1.0-6.0]",
    ),
    "processes": (
        "tests/contract", "tests/fault",
        "tests/fault/test_bit_identity.py::test_faults_and_world_size_change_no_bit[0]",
        "tests/fault/test_experiments.py::test_an_experiment_that_is_cut_off_never_says_violated[step-1-TERM]",
        "tests/fault/test_bit_identity.py::test_faults_and_world_size_change_no_bit[1]",
        "tests/fault/test_fsdp.py::test_a_storm_changes_no_bit[0]",
        "tests/fault/test_fsdp.py::test_a_loss_costs_the_shards_of_the_lost_rank_and_not_the_step[1]",
        "tests/fault/test_fsdp.py::test_no_world_size_changes_a_bit[2]",
        "tests/fault/test_fsdp.py::test_no_world_size_changes_a_bit[3]",
        "tests/fault/test_fsdp_memory.py::test_a_rank_holds_what_the_law_says[4-1]",
        "tests/fault/test_fsdp_loops.py::test_a_kill_changes_no_bit[scaled-fsdp]",
        "tests/fault/test_fsdp_moments.py::test_a_rank_is_killed[before-the-first-gather-moment0]",
        "tests/fault/test_fsdp_moments.py::test_a_rank_is_killed[serves-a-stretch-moment2]",
        "tests/fault/test_fsdp_moments.py::test_a_rank_is_killed[in-a-forward-moment3]",
        "tests/fault/test_fsdp_moments.py::test_a_rank_is_killed[in-a-backward-moment5]",
        "tests/fault/test_fsdp_moments.py::test_a_rank_is_killed[a-gradient-has-come-moment9]",
        "tests/fault/test_fsdp_moments.py::test_a_rank_is_killed[means-travel-moment10]",
        "tests/fault/test_fsdp_moments.py::test_a_rank_is_killed[behind-ready-moment12]",
        "tests/fault/test_fsdp_moments.py::test_a_rank_is_killed[in-apply-moment14]",
        "tests/fault/test_fsdp_moments.py::test_a_rank_is_killed[behind-apply-moment15]",
        "tests/fault/test_fsdp_moments.py::test_a_rank_is_killed[writes-a-checkpoint-moment17]",
        "tests/fault/test_fsdp_moments.py::test_a_spare_gets_or_keeps_its_part_as_a_rank_is_killed[3-slices-have-come]",
        "tests/fault/test_fsdp_moments.py::test_a_spare_gets_or_keeps_its_part_as_a_rank_is_killed[3-behind-ready]",
        "tests/fault/test_fsdp_moments.py::test_a_spare_gets_or_keeps_its_part_as_a_rank_is_killed[0-gives-the-rest]",
        "tests/fault/test_gather.py::test_a_kill_changes_no_bit[none-first pass]",
        "tests/fault/test_gather.py::test_a_kill_changes_no_bit[fsdp-exchange]",
        "tests/fault/test_gather.py::test_a_kill_changes_no_bit[zero1-second pass]",
        "tests/fault/test_ended_by_loop.py::test_a_run_is_completed_at_one_step_and_a_kill_in_it_changes_nothing[stop-none]",
        "tests/fault/test_ended_by_loop.py::test_a_run_is_completed_at_one_step_and_a_kill_in_it_changes_nothing[break-none]",
        "tests/fault/test_ended_by_loop.py::test_a_run_is_completed_at_one_step_and_a_kill_in_it_changes_nothing[on top-zero1]",
        "tests/fault/test_hsdp.py::test_a_spare_takes_the_place_of_a_member_that_is_lost[3]",
        "tests/fault/test_hsdp.py::test_a_whole_group_may_be_lost_at_once[places0]",
        "tests/fault/test_resharded_checkpoints.py::test_others_go_on_from_what_four_ranks_have_written[fsdp-3]",
        "tests/fault/test_tensor.py::test_no_number_of_replicas_changes_a_bit[4-units-fsdp]",
        "tests/fault/test_tensor.py::test_a_member_is_killed_whose_column_spreads_its_state[zero1-behind-its-columns-sums-2]",
        "tests/fault/test_tensor.py::test_a_member_is_killed_whose_column_spreads_its_state[fsdp-a-gradient-leaves-1]",
        "tests/fault/test_tensor.py::test_a_member_is_killed[in-a-sum-1]",
        "tests/fault/test_tensor.py::test_a_member_is_killed[before-the-sum-2]",
        "tests/fault/test_tensor.py::test_a_member_is_killed[before-apply-1]",
        "tests/fault/test_tensor.py::test_two_members_are_killed_in_one_step[3-1]",
        "tests/fault/test_pipeline.py::test_no_number_of_stages_or_replicas_changes_a_bit[4-4]",
        "tests/fault/test_pipeline.py::test_a_rank_is_killed[between-its-halves-0]",
        "tests/fault/test_pipeline.py::test_a_rank_is_killed[behind-ready-1]",
        "tests/fault/test_pipeline.py::test_a_rank_is_killed[gives-again-1]",
        "tests/fault/test_pipeline.py::test_two_ranks_are_killed_in_one_step[0,3]",
        "tests/fault/test_several_optimizers.py::test_a_kill_changes_no_bit[in_turn-fsdp]",
        "tests/fault/test_several_optimizers.py::test_a_kill_changes_no_bit[in_turn-zero1]",
        "tests/fault/test_sharded_optimizer.py::test_a_storm_changes_no_bit[0]",
        "tests/zoo/test_zoo.py", "tests/zoo/test_left_out.py",
    ),
    "hosts": (
        "tests/hosts/test_join.py::test_what_a_run_saves_and_prints_is_where_its_user_looks",
        "tests/hosts/test_links.py::test_a_partition_cuts_old_and_new_connections_until_it_is_healed",
        "tests/hosts/test_links.py::test_packets_come_later_and_in_no_time_again_when_it_is_healed",
        "tests/hosts/test_losses.py::test_a_host_is_cut_off_for_a_while_and_another_dies_and_boots",
    ),
}  # fmt: skip
"""``.ci/run`` runs all three, ``make test`` the first."""

NIGHTLY: dict[str, dict[str, str]] = {
    "seeds": {
        "tests/simulation/test_gathers.py::test_one_rank_lost_behind_any_event_of_a_step_costs_no_state[1-1]":
            "every event of a step in turn takes minutes; each change tries every twelfth",
        "tests/simulation/test_daemons.py::test_in_these_seeds_coordinators_and_agents_stand_still_and_are_killed":
            "whether a family has what it is for changes with its generator alone; each change tries seeds of the day",
        "tests/simulation/test_cuts.py::test_when_the_coordinator_is_cut_off_nothing_is_lost":
            "lengths of a cut times what a run does then, of which each change has two",
        "tests/simulation/test_flips.py::test_a_mutation_is_caught[nobody_judges-names2]":
            "many seeds until no rank can be judged; each change has the other mutations",
        "tests/simulation/test_gathers.py::test_a_mutation_is_caught[what_was_missed_is_missed_for_ever]":
            "the same of a gather that is missed",
        "tests/property/test_traces.py::test_lives_that_follow_the_law_are_seldom_said_not_to_and_others_mostly":
            "how often a test of a law errs takes many samples, and changes with its formula alone",
        "tests/property/test_scale_fit.py::test_the_interval_of_the_held_out_world_holds_it_as_often_as_it_says":
            "the same of more worlds and noises, of which each change has one",
        "tests/property/test_admission.py::test_a_stream_of_urgent_runs_starves_nobody":
            "queues of many hours; each change has the promises",
        "tests/property/test_topology.py::test_the_bound_is_what_the_best_of_all_ways_reaches": "it tries all ways to place ranks",
        "tests/unit/test_folding.py::test_a_journal_grows_by_so_much_and_its_old_part_by_next_to_nothing":
            "a longer journal; each change has a shorter one",
        "tests/simulation/test_resizes.py::test_in_these_seeds_worlds_shrink_and_grow": "the same of another family",
        "tests/simulation/test_stops.py::test_in_these_seeds_runs_stop_in_time_and_through_other_troubles": "the same of another family",
        "tests/simulation/test_stores.py::test_in_these_seeds_checkpoints_fail_and_histories_begin_from_the_store":
            "the same of another family",
        "tests/simulation/test_stragglers.py::test_in_these_seeds_something_is_done_about_slow_ranks": "the same of another family",
    },
    "products": {
        "tests/fault/test_one_holder.py": "three clusters at once, and a wait of 30 s; each change has racers without clusters",
        "tests/fault/test_fsdp_moments.py::test_a_rank_is_killed": "each moment of a step, of which each change has ten",
        "tests/fault/test_fsdp.py::test_a_rank_lost_at_a_moment_of_the_step":
            "moments of a step of a larger model; each change has ten of a smaller one",
        "tests/fault/test_gather.py::test_a_kill_changes_no_bit":
            "three moments times three ways to spread a state, of which each change has three",
        "tests/fault/test_ended_by_loop.py::test_a_run_is_completed_at_one_step_and_a_kill_in_it_changes_nothing":
            "ways to end times ways to spread a state, of which each change has three",
        "tests/fault/test_bad_luck.py::test_a_newcomer_computes_nothing_in_its_first_step_where_that_can_be[layer-False]":
            "the second kind of norm; each change has the first",
        "tests/fault/test_overlap.py::test_death_in_a_backward_whose_first_buckets_were_sent[zero1]": "a second way to spread a state",
        "tests/fault/test_two_levels.py::test_two_levels_are_used_and_end_with_the_bits_of_one[in turns]":
            "a second order of ranks on hosts",
        "tests/zoo/test_left_out.py::test_from_the_checkpoint_on_it_is_the_plain_loop_without_these_samples[]":
            "without a kill; each change has it with one behind it",
        "tests/fault/test_fsdp.py::test_a_second_backward_of_a_shard_is_not_lost": "two runs, one for each way",
        "tests/fault/test_hsdp.py::test_one_of_each_group_may_be_lost_unless_they_are_at_one_place": "pairs of places of two groups",
        "tests/fault/test_bit_identity.py::test_faults_and_world_size_change_no_bit": "eighteen more storms beside two of each change",
        "tests/fault/test_fsdp.py::test_a_storm_changes_no_bit": "eleven more storms beside one of each change",
        "tests/fault/test_fsdp.py::test_no_world_size_changes_a_bit": "more worlds, of which each change has two",
        "tests/fault/test_fsdp.py::test_a_loss_costs_the_shards_of_the_lost_rank_and_not_the_step":
            "a second number of copies, of which each change has one",
        "tests/fault/test_fsdp_exchange.py": "bytes of each mode and world; a law changes seldom, and is tested by itself",
        "tests/fault/test_fsdp_memory.py": "memory of each mode and world, of which each change has one",
        "tests/fault/test_fsdp_loops.py::test_a_kill_changes_no_bit":
            "every kind of loop; tests/fault/test_fsdp.py has kills in each change",
        "tests/fault/test_fsdp_moments.py::test_a_second_one_is_killed_in_the_view_that_follows": "pairs of moments of two losses",
        "tests/fault/test_fsdp_moments.py::test_a_process_is_killed_that_takes_the_place_of_a_lost_one":
            "a pair of moments of a loss and a join",
        "tests/fault/test_hsdp.py::test_a_spare_takes_the_place_of_a_member_that_is_lost": "each place of a group, of which one is in CI",
        "tests/fault/test_hsdp.py::test_a_whole_group_may_be_lost_at_once": "each group in turn, of which one is in CI",
        "tests/fault/test_resharded_checkpoints.py::test_others_go_on_from_what_four_ranks_have_written": "products of modes and worlds",
        "tests/fault/test_resharded_checkpoints.py::test_plain_fsdp_reads_it_at_another_world_size_and_mesh": "products of meshes",
        "tests/fault/test_several_optimizers.py::test_a_kill_changes_no_bit":
            "loops times ways to spread a state, of which each change has two",
        "tests/fault/test_several_optimizers.py::test_a_run_stops_between_groups_and_goes_on_there":
            "each way to spread a state; that no rank halts within a group is a unit test",
        "tests/fault/test_fsdp_moments.py::test_a_spare_gets_or_keeps_its_part_as_a_rank_is_killed":
            "each moment and rank, of which each change has three",
        "tests/fault/test_sharded_optimizer.py::test_a_storm_changes_no_bit": "eleven more storms beside one of each change",
        "tests/fault/test_pipeline.py::test_no_number_of_stages_or_replicas_changes_a_bit":
            "stages times replicas, of which each change has one",
        "tests/fault/test_pipeline.py::test_a_rank_is_killed": "each moment and stage, of which each change has three",
        "tests/fault/test_pipeline.py::test_two_ranks_are_killed_in_one_step": "pairs of ranks, of which each change has one",
        "tests/fault/test_tensor.py::test_no_number_of_replicas_changes_a_bit": "worlds times ways to divide a model and to spread it",
        "tests/fault/test_tensor.py::test_a_member_is_killed_whose_column_spreads_its_state": "moments times ways to spread a state",
        "tests/fault/test_tensor.py::test_others_go_on_from_what_two_replicas_have_written":
            "six runs for each way to spread a state; each change goes on from a checkpoint that is spread",
        "tests/fault/test_tensor.py::test_each_rank_reads_its_part_of_the_weights": "each way to spread a state",
        "tests/fault/test_tensor.py::test_a_group_leaves_a_node_that_goes_and_spares_come": "each way to spread a state",
        "tests/fault/test_tensor.py::test_a_world_shrinks_and_grows_by_whole_groups": "each way to spread a state",
        "tests/fault/test_tensor.py::test_a_rank_whose_bits_flip_is_named_by_its_column": "ways to spread a state times faults",
        "tests/fault/test_tensor.py::test_the_model_is_saved_whole_and_evaluated_by_whole_groups": "each way to spread a state",
        "tests/fault/test_tensor.py::test_a_member_is_killed": "each moment and member, of which each change has three",
        "tests/fault/test_tensor.py::test_two_members_are_killed_in_one_step": "pairs of members, of which each change has one",
        "tests/fault/test_two_levels.py::test_death_at_either_level_of_a_sum": "three modes times three moments",
        "tests/fault/test_stop_in_order.py::test_a_state_that_is_spread_is_written_by_all_who_hold_a_part":
            "each way to spread a state; who writes what is a unit test",
        "tests/zoo/test_zoo.py::test_a_compiled_loop_changes_no_bit_either_where_it_is_compiled_to_machine_code":
            "a compiler runs in each rank; each change has a loop that torch.compile traces",
        "tests/fault/test_hugging_face.py::test_patience_goes_on_where_the_run_was_stopped":
            "two runs that import transformers in each rank; each change has one with a kill",
        "tests/fault/test_lightning.py::test_several_optimizers_go_through_a_kill_between_two_steps_of_a_batch":
            "two more runs that import Lightning in each rank; each change has one with a kill",
        "tests/fault/test_lightning.py::test_patience_goes_on_where_the_run_was_stopped":
            "two runs that import Lightning in each rank; each change has one with a kill",
        "tests/zoo/test_zoo.py::test_a_kill_a_stop_and_a_resume_change_no_bit": "loops times worlds; each change has a kill of many loops",
        "tests/zoo/test_zoo.py::test_a_kill_changes_no_bit[heads]": "a kill of one more loop",
        "tests/zoo/test_zoo.py::test_a_kill_changes_no_bit[critics]": "a kill of one more loop",
        "tests/zoo/test_zoo.py::test_a_kill_changes_no_bit[codebook]": "a kill of one more loop",
        "tests/zoo/test_zoo.py::test_a_kill_changes_no_bit[contrastive]": "a kill of one more loop",
        "tests/zoo/test_zoo.py::test_a_kill_changes_no_bit[diffusion]": "a kill of one more loop",
        "tests/zoo/test_zoo.py::test_a_kill_changes_no_bit[penalty]": "a kill of one more loop",
        "tests/zoo/test_zoo.py::test_a_kill_changes_no_bit[swa]": "a kill of one more loop",
        "tests/zoo/test_zoo.py::test_a_kill_changes_no_bit[unused]": "a kill of one more loop",
        "tests/zoo/test_zoo.py::test_a_kill_changes_no_bit[thawed]": "a kill of one more loop",
        "tests/fault/test_exchanged_ranks.py::test_a_rank_leaves_a_node_that_goes_and_a_spare_comes[zero1]":
            "a second way to spread a state; each change has whole and cut parameters",
        "tests/fault/test_exchanged_ranks.py::test_a_world_shrinks_and_grows_between_steps[zero1]": "the same of a world that shrinks",
    },
    "shown": {
        "tests/fault/test_nobody_in.py::test_coordinator_and_agent_are_killed_and_find_the_secret_again":
            "a run of its own; each change kills a coordinator in tests/fault/test_bad_luck.py",
        "tests/fault/test_ended_runs.py::test_what_is_saved_behind_the_loop_is_the_trained_model":
            "a run of its own; each change has it without Ray in tests/fault/test_end_of_run.py",
        "tests/fault/test_scripts_executed.py":
            "a run on a cluster for each way to name a script; each change executes scripts in tests/fault/test_drivers.py",
        "tests/fault/test_object_store.py::test_a_bucket_that_is_not_there_ends_the_command_before_a_run_begins":
            "a command that fails; each change has the store itself",
        "tests/fault/test_ray_runs.py::test_a_barrier_of_ray_train_is_refused_at_its_line": "a run of its own that has to fail",
        "tests/fault/test_cluster_doctor.py": "a cluster of its own; what is said of what it finds are unit tests",
        "tests/fault/test_shield.py::test_whoever_forsakes_a_cluster_has_no_thread_left_in_ray": "what Ray keeps changes with its pin",
        "tests/fault/test_shield.py::test_two_ranks_lost_in_one_poll": "what Ray Train polls changes with its pin",
        "tests/fault/test_shield.py::test_fit_returns_early_on_request": "each change stops runs in tests/fault/test_stop_in_order.py",
        "tests/contract/test_trackers.py::test_what_is_away_gets_all_of_it_when_it_is_back[mlflow]":
            "mlflow's server is slow; each change has two other trackers",
        "tests/contract/test_trackers.py::test_what_is_sent_twice_is_there_once[mlflow]": "the same of what is sent twice",
        "tests/contract/test_trackers.py::test_when_the_time_is_up_it_says_what_it_lacks_and_the_rest_is_sent_later[mlflow]":
            "the same of what is late",
        "tests/contract/test_trackers.py::test_a_journal_that_was_written_anew_is_counted_anew[mlflow]":
            "the same of a journal that was written anew",
        "tests/contract/test_live_page.py::test_it_fits_a_phone_and_can_be_read[dark]": "a second scheme; each change has the other one",
        "tests/contract/test_live_page.py::test_every_curve_has_axes_and_the_values_under_the_mouse[narrow]":
            "a second width; each change has the other one",
        "tests/contract/test_live_page.py::test_categories_are_explained_to_whoever_has_only_a_keyboard":
            "words that change with the page alone",
        "tests/contract/test_live_page.py::test_the_arrow_keys_go_along_a_curve": "the same of a curve",
        "tests/contract/test_live_page.py::test_whoever_scrolls_up_in_a_log_stays_there": "a reader waits for lines that come",
        "tests/contract/test_live_page.py::test_whoever_reads_a_word_stays_there_while_the_run_goes_on": "the same of a word",
        "tests/fault/test_experiments.py::test_an_experiment_is_held_and_one_whose_fault_hits_nobody_is_not":
            "an experiment takes a minute, and its parts are unit tests",
        "tests/fault/test_encrypted_ranks.py::test_a_killed_rank_is_replaced_and_changes_no_bit[fsdp]":
            "the same ranks with sharded parameters; each change has whole ones",
        "tests/fault/test_experiments.py::test_an_experiment_that_is_cut_off_never_says_violated":
            "twenty experiments; each change has two that are cut off early",
        "tests/fault/test_gpus.py::test_each_rank_has_its_own_gpu_and_so_has_who_replaces_it": "a cluster with GPUs that are made up",
        "tests/fault/test_shield.py::test_a_node_with_two_ranks_is_lost":
            "a run of its own; each change loses a node in tests/fault/test_ray_runs.py",
        "tests/fault/test_nobody_in.py::test_the_secret_is_where_it_has_to_be_and_nowhere_else": "it reads all memory and files of a run",
        "tests/fault/test_on_purpose.py": "a run is resized and paused, and waits each time",
        "tests/fault/test_output.py::test_in_a_file_there_are_whole_lines_and_a_reader_that_leaves_stops_nothing":
            "two runs, one after the other",
        "tests/fault/test_ray_runs.py::test_with_sharded_state_a_rank_is_lost_and_then_ray_trains_controller":
            "without Ray each change loses ranks of sharded state",
        "tests/fault/test_trainer.py::test_no_report_is_left_out_where_a_newcomer_is_the_first_rank_of_its_view":
            "a run of its own, a minute long",
        "tests/fault/test_up.py::test_runs_that_are_handed_in_have_their_turn_and_all_their_ranks": "a queue that waits for turns",
        "tests/fault/test_alerts.py": "a real Prometheus waits for alerts; their rules are tested by promtool with each change",
        "tests/fault/test_autoscaled.py": "an autoscaler takes a minute to notice what is idle",
        "tests/fault/test_bad_luck.py::test_a_store_that_is_gone_for_a_while_stops_nothing": "it waits for time-outs",
        "tests/fault/test_doc_blocks.py::test_what_was_there_before_runs_too": "the plain half of each diff, which PyTorch decides",
        "tests/fault/test_drain.py": "five ways of a notice, a minute each; the simulator has them all with each change",
        "tests/fault/test_ended_runs.py::test_steps_go_on_beyond_the_end_as_a_new_run":
            "two runs, one after the other; what a resume may change is in tests/fault/test_resumes.py with each change",
        "tests/fault/test_ended_runs.py::test_a_run_without_any_checkpoint_exports_nothing_and_says_so": "of the second of these runs",
        "tests/fault/test_launch.py::test_ctrl_c_stops_a_script_in_order_and_leaves_nothing_behind":
            "a run of its own; each change interrupts that of a command",
        "tests/fault/test_ray_runs.py::test_every_panel_of_every_dashboard_has_an_answer_while_chaos_strikes":
            "a Prometheus for a minute; tests/contract/test_boards.py has the panels with each change",
        "tests/fault/test_shield.py::test_what_hangs_and_is_not_killed_by_others": "it waits for time-outs",
        "tests/unit/test_first_steps.py::test_where_nothing_can_be_told_the_run_goes_on_and_nothing_was_changed":
            "a process for each thing that a trial may not do; each change has two",
        "tests/unit/test_determinism.py::test_what_is_another_in_each_process_is_found_by_processes":
            "four processes of a script; each change has those of the command",
        "tests/unit/test_determinism.py::test_an_example_is_clean[digits]": "a second example; each change has a smaller one",
        "tests/unit/test_determinism.py::test_a_clean_script_ends_with_0": "four processes of a script; each change has what it finds",
        "tests/unit/test_extending.py::test_an_example_works_and_takes_as_many_files_as_it_says":
            "copies of all packages and their tests; each change has a metric and a layout of the state",
        "tests/unit/test_replay.py::test_a_run_is_the_same_in_every_process": "a tool for refactorings, of which each change has one test",
        "tests/unit/test_replay.py::test_what_was_renamed_on_purpose_is_no_difference": "of the same tool",
        "tests/unit/test_shard_prices.py::test_the_command_measures_each_number_of_shards": "three worlds are measured for seconds each",
        "tests/unit/test_storage_crash.py::test_a_crash_before_each_operation_on_an_object_store":
            "each point on a real store; each change has them on a disk, and processes that are killed while they upload",
        "tests/unit/test_storage_outage.py::test_a_server_that_hangs_is_a_time_out_and_all_is_well_when_it_goes_on":
            "it waits for four time-outs",
        "tests/fault/test_drivers.py::test_a_driver_that_stands_still_while_a_rank_is_killed_holds_nobody_up": "it waits for time-outs",
        "tests/fault/test_drivers.py::test_a_run_whose_control_store_is_killed_ends_in_order_and_is_resumed": "it waits for time-outs",
        "tests/fault/test_experiments.py::test_a_fleet_that_is_broken_is_found_out": "broken fleets, each an experiment of its own",
        "tests/fault/test_guide.py": "the whole guide, command by command, takes four minutes",
        "tests/fault/test_models.py::test_a_hugging_face_model_has_the_bits_of_whole_replicas": "it imports transformers in each rank",
        "tests/fault/test_models.py::test_a_lightning_module_has_the_bits_of_whole_replicas": "it imports Lightning in each rank",
        "tests/fault/test_nano.py": "a storm of a longer example, and its twin",
        "tests/fault/test_object_store.py::test_the_example_resumes_from_s3_after_all_ranks_are_lost":
            "two runs and their imports, a minute; tests/contract has the object store with each change",
        "tests/fault/test_launch.py::test_a_failed_run_raises_in_a_thread_and_a_second_one_beside_it_is_refused":
            "a run of its own that has to fail first",
        "tests/fault/test_object_store.py::test_nodes_that_cannot_use_the_store_start_no_rank[True]": "it is resumed there",
        "tests/fault/test_output.py::test_on_a_terminal_of_60_columns_one_line_lives_and_all_else_is_whole":
            "a run in a terminal of its own",
        "tests/fault/test_output.py::test_the_last_lines_are_eight_at_most_and_the_last_says_how_to_load_the_model": "of the same run",
        "tests/fault/test_output.py::test_what_ray_has_to_say_is_not_among_what_ranks_print": "of the same run",
        "tests/fault/test_pace.py": "commits are compared for minutes; its parts are unit tests",
        "tests/fault/test_pictures.py": "pictures of a real run in a real browser; they change with the pages",
        "tests/fault/test_peer_memory.py::test_a_store_that_takes_nothing_stops_nothing_and_every_failure_is_told":
            "it waits for time-outs",
        "tests/fault/test_plain.py::test_a_script_goes_on_from_its_own_checkpoint_and_ends_as_without_faults":
            "two runs of a script that is not Fleet's; what is done about its losses are unit tests",
        "tests/fault/test_looks.py::test_twenty_looks_at_a_run_of_a_cluster_leave_no_trace":
            "each look imports Ray, a minute in all; each change has looks at a run of this machine, and unit tests of the others",
        "tests/fault/test_stragglers.py": "a slow rank is known after a minute; the simulator has them with each change",
        "tests/contract/test_ray_facts.py": "what Ray does changes with its pin alone: `make versions` has it, too",
        "tests/contract/test_fsdp_facts.py": "what PyTorch does changes with its pin alone",
        "tests/fault/test_plain.py::test_a_script_that_always_fails_is_not_started_for_ever": "it waits for growing pauses",
        "tests/fault/test_ray_runs.py::test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_no_rank": "a run for each kind of disk",
        "tests/fault/test_ray_runs.py::test_a_flipped_bit_in_one_ranks_weights_is_outvoted_and_changes_no_bit_of_the_result":
            "without Ray each change has it in tests/fault/test_corruption.py",
        "tests/fault/test_ray_runs.py::test_a_slow_disk_costs_time_to_save_and_no_rank": "a run for each kind of disk",
        "tests/fault/test_rehearsal.py": "predictions are measured by long runs",
        "tests/fault/test_scale.py::test_a_world_is_predicted_and_then_measured": "a run of each world, to be measured",
        "tests/fault/test_store_outage.py::test_a_run_that_is_to_stop_without_its_store_stops_in_order": "it waits for its time-out alone",
        "tests/fault/test_stop_moments.py": "sixty runs, each of which is told to stop at a random moment",
        "tests/fault/test_full_disk.py::test_at_a_random_moment_nothing_that_is_committed_is_lost":
            "twenty runs; each change has a journal, a folder and output",
        "tests/fault/test_topology.py::test_a_rack_is_lost_as_one_and_what_the_new_placement_lacks_is_said": "a cluster of four nodes",
        "tests/fault/test_trackers.py::test_a_run_goes_on_without_its_trackers_and_they_get_all_of_it":
            "outages; tests/contract/test_trackers.py has the trackers themselves with each change",
        "tests/fault/test_trainer.py::test_a_port_goes_through_a_kill_and_ends_with_the_bits_of_its_twin":
            "ports of three examples, each with its twin",
        "tests/fault/test_trainer.py::test_a_trainer_of_the_same_name_goes_on_from_what_was_reported":
            "two runs, one after the other",
        "tests/fault/test_up.py::test_a_run_gives_way_to_an_urgent_one_and_ends_with_the_same_bits":
            "a queue that waits for grace and turns",
        "tests/fault/test_up.py::test_fleet_up_serves_all_runs_with_a_prometheus_and_leaves_nothing": "a Prometheus that has to be scraped",
        "tests/fault/test_wheel.py::test_the_source_archive_builds_the_same_wheel": "a second build, a minute long",
        "tests/unit/test_determinism.py::test_an_example_is_clean[gpt]": "the longest example; each change has the two others",
        "tests/unit/test_cli_init.py::test_the_plain_script_trains_and_goes_on_from_its_own_checkpoint":
            "two runs of a script that is written, and changes seldom",
        "tests/contract/test_checkpoint_store.py::test_plain_pytorch_loads_it_in_a_process_that_cannot_import_fleet":
            "a process for each store and number of parts, of which each change has two",
        "tests/contract/test_listeners.py::test_broken_frames_and_slow_peers_cost_nothing": "slow peers are waited for, for each listener",
        "tests/contract/test_s3_urls.py::test_the_journal_is_copied_and_comes_back": "a store that goes away and comes back",
    },
    "benchmarks": {"tests/fault/test_benchmarks.py": "every benchmark in its smoke form"},
    "night-hosts": {"tests/hosts": "clusters of hosts start for a minute each; a change has a join, a loss, a cut and two links"},
}  # fmt: skip
"""Part of ``make nightly`` -> line -> why it is not run with each change."""

LINES: dict[str, str] = {
    **{line: tier for tier, lines in TIERS.items() for line in lines},
    **{line: part for part, lines in NIGHTLY.items() for line in lines},
}


def lines_above(nodeid: str) -> list[str]:
    """What may name a test, the most specific first: ``folder/file::test[parameters]``, ``folder/file::test``, the file, its folders."""
    path, _, test = nodeid.partition("::")
    tests = [nodeid, nodeid.partition("[")[0]] if test else []
    return list(dict.fromkeys([*tests, path, *(parent.as_posix() for parent in Path(path).parents if parent.as_posix() != ".")]))


def tier_of(nodeid: str) -> str | None:
    """The tier or nightly part of a test or a test file; None where no line names it."""
    return next((LINES[line] for line in lines_above(nodeid) if line in LINES), None)


def files(name: str, paths: Iterable[str]) -> list[str]:
    """Those of ``paths`` in which tier or part ``name`` has tests, the slowest first, as they are listed."""
    named = [line.partition("::")[0] for line, tier in LINES.items() if tier == name]
    own = [path for path in paths if tier_of(path) == name or path in named]
    order = {f"test_{name}.py": number for number, name in enumerate(SLOWEST)}
    return sorted(own, key=lambda path: order.get(Path(path).name, len(order)))


SLOWEST = (
    "bad_luck", "drivers", "ray_runs", "launch", "ended_runs", "zoo", "scripts_executed", "trainer", "stop_in_order", "shield",
    "fsdp_moments", "live_page", "nobody_in", "plain", "trackers", "corruption", "fsdp", "wheel", "up", "object_store", "benchmarks",
    "alerts",
)  # fmt: skip
"""Files that begin first, so that no process waits for one of them at the end."""


def unknown(nodeids: Iterable[str], *, whole: bool) -> list[str]:
    """Lines that name a test of a collected file, and no test. ``whole``: all tests of these files were collected."""
    seen = {line for nodeid in nodeids for line in lines_above(nodeid)}
    return [line for line in LINES if whole and "::" in line and line.partition("::")[0] in seen and line not in seen]


def test_files() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


def names() -> list[str]:
    return [*TIERS, *NIGHTLY]


if __name__ == "__main__":
    chosen = sys.argv[1]
    if chosen not in names():
        sys.exit(f"{chosen!r} is no tier or part: {', '.join(names())}")
    print(*files(chosen, test_files()))
