"""Parametrizations that only ``make test-all`` runs, and why the short run has what they test.

Each row: the test, a pattern that is searched for in its parameters' ids, the reason. What is left runs
through the same branches of the code.
"""

from __future__ import annotations

import re

_ROWS = (
    (
        "test_agent_budget.py::test_no_span_uses_more_than_its_share", "^[23]-",
        "two more draws of the same machine",
    ),
    (
        "test_agent_history.py::test_the_history_leads_to_the_same_collectives_as_the_packets",
        "egress|reduce-n6|mpi-all",
        "segments hold messages, whatever library sent them; Gloo, NCCL and an Open MPI job are left",
    ),
    (
        "test_agent_limits.py::test_in_a_flood_the_agent_settles_at_its_limits", "",
        "150 drawn worlds of eight minutes; the one that once failed has a test of its own",
    ),
    (
        "test_agent_windows.py::test_a_clock_that_is_set_loses_nothing", "egress|reduce-n6|mpi",
        "a clock is moved by the same code whatever the packets carry; TCP and RoCE are left",
    ),
    (
        "test_agent_windows.py::test_each_collective_is_published_once_and_as_the_whole_capture_has_it",
        "^1.0-(gloo|mpi)|0.3-mpi-allreduce-ucx",
        "the same captures in fewer steps; UCX's many messages are left in the test of what is held",
    ),
    (
        "test_agent_windows.py::test_what_is_held_is_bounded_by_the_span",
        "egress|reduce-n6|mpi-allreduce-n4|two-parts|libfabric|barrier",
        "other jobs of the libraries that are left; the one with the most messages is left",
    ),
    (
        "test_arcs.py::test_rings_from_some_nodes", "^(?!.*(1000000|600000, protocol: ll-)).*only[13]$",
        "which nodes are captured is tried with two of the operations, each operation with three choices",
    ),
    (
        "test_bench_accuracy.py::test_bounds_on_a_slow_link_hold", "^215$",
        "another scenario of the same kind",
    ),
    (
        "test_bench_accuracy.py::test_causes_and_verdicts_that_were_wrong", "^(95|39)$",
        "two more scenarios of the same kind",
    ),
    (
        "test_bench_accuracy.py::test_nobody_is_blamed_for_the_network", "^(4001|4171)$",
        "two more scenarios of the same kind",
    ),
    (
        "test_credited.py::test_ring_of_nccl", "bytes: (20000000|9000000)-",
        "the same ring with more bytes",
    ),
    (
        "test_doca.py::test_copies_are_the_packets_and_production_goes_on",
        "^(2.7-mirror|2.9-mirror|3.2-flood)$",
        "releases between those that are left; the oldest and the newest of each way to copy are",
    ),
    (
        "test_doca.py::test_killed_while_it_captures", "^(2.7-0|3.3-1)$",
        "a release where rules stay and one where they go are left",
    ),
    (
        "test_doca.py::test_whichever_call_fails_production_goes_on_and_nothing_leaks", "^(2.7|2.9|3.2)-$",
        "what is left runs under sanitizers, or copies to a port",
    ),
    (
        "test_figures.py::test_what_another_algorithm_makes_of_it", "^8-1-",
        "recursive doubling of four ranks is left",
    ),
    (
        "test_fuzz_found.py::test_thousands_of_addresses_have_no_schedules_of_as_many_squared", "",
        "a bound on time and memory at thousands of addresses",
    ),
    (
        "test_hidden.py::test_a_slow_way_makes_bounds_of_what_it_brings", "^1$",
        "another node",
    ),
    (
        "test_hops.py::test_rings_over_nodes_seen_in_part", "^(?!.*61440).*-(3-8-8|4-4-2|5-2-2)-",
        "the largest clusters are tried with one operation, all operations with smaller ones",
    ),
    (
        "test_islands.py::test_a_ring_over_all_rails_is_one_operation", "^(0|-40000000000)$",
        "other distances of two clocks; one of some milliseconds is left",
    ),
    (
        "test_kept.py::test_what_is_kept_takes_no_more_memory_than_is_said", "",
        "a bound on memory over groups of many sizes: every allocation is traced",
    ),
    (
        "test_lateness.py::test_charges_never_exceed_the_true_waiting", "^(100|200)$",
        "more draws of random worlds",
    ),
    (
        "test_lateness.py::test_what_is_said_of_random_worlds_is_true", "^(50|100|150|200|250|350)$",
        "more draws of random worlds",
    ),
    (
        "test_later_steps.py::test_the_step_at_which_a_ring_stalls_tells_who_was_late", "^[123]$",
        "each of five ranks late: the first and the last are left",
    ),
    (
        "test_layouts.py::test_recognised", "-(64-2-told5|33-1-told8|8-2-told10|7-4-told2)$",
        "the largest groups of trees and PAT; smaller ones are left",
    ),
    (
        "test_lost.py::test_collectives_are_found_although_captures_lost_packets", "^6-0.001-",
        "six ranks instead of four",
    ),
    (
        "test_malformed.py::test_as_many_packets_as_tshark_finds", "",
        "a start of tshark for each file; what is read of each is asserted without it",
    ),
    (
        "test_memory_bound.py::test_no_shape_takes_more",
        "^(?!hub|mesh|small_nccl|cut_segments|holes|strangers)",
        "a process each; the shapes that once took the most are left",
    ),
    (
        "test_mid_job.py::test_nothing_is_invented", "^apart-(tree|queue pairs|adaptive)$",
        "captures that begin apart are left with four other jobs, these jobs with others",
    ),
    (
        "test_nccl_sockets.py::test_operations", "bytes: 7000-|tree|pat-",
        "trees and PAT over sockets are left as programs",
    ),
    (
        "test_nccl_sockets.py::test_operations_from_some_nodes", "only[13]$",
        "two more choices of captured nodes: one is alone and three of six are captured in what is left",
    ),
    (
        "test_nccl_sockets.py::test_programs",
        "^((rings|several|sharded)-.*-persistent|(rings|lines|trees|blocks)-.*-random)",
        "each program is left once, and each way to begin in mid-job",
    ),
    (
        "test_oracle_tshark.py::test_every_shape_of_pcapng", "^be$",
        "the other byte order, which the reader is tested with beside tshark",
    ),
    (
        "test_other_waits.py::test_a_slow_link_is_no_late_gpu", "^job1-8-",
        "eight ranks instead of four",
    ),
    (
        "test_partial_capture.py::test_a_ring_seen_at_one_rank_is_no_pipeline", "^2$",
        "the same capture from another node",
    ),
    (
        "test_rails.py::test_rings", "90000000|60000000|4800000-3-4-8",
        "more loops and channels of operations that are left",
    ),
    (
        "test_sampled.py::test_a_sample_is_told_by_its_numbers", "^job[03]-2-socket$",
        "one packet of eight or sixteen is left over sockets, one of two over RoCE",
    ),
    (
        "test_stalls.py::test_errors_hold_where_hosts_stall", "",
        "statistics over six drawn jobs",
    ),
    (
        "test_stalls.py::test_how_far_two_values_differ", "^2500$",
        "all pairs of 2500 values; 60 are left",
    ),
    (
        "test_stalls.py::test_stalls_are_nobodys_habit", "",
        "statistics over six drawn jobs",
    ),
    (
        "test_stalls.py::test_stalls_beside_losses_of_an_all_to_all", "^[18]$",
        "two more draws",
    ),
    (
        "test_stamps.py::test_absurd_stamps_alone", "[023]",
        "three more draws",
    ),
    (
        "test_synth_case.py::test_every_icrc_is_right", "congestion|notices|reads lost",
        "ICRCs of the same builders' packets, by the thousand",
    ),
)  # fmt: skip
LONGER = {test: (re.compile(pattern), why) for test, pattern, why in _ROWS}
