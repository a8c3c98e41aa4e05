"""Parametrizations that only ``make test-all`` runs, and why the short run has what they test.

Each row: the test, a pattern that is searched for in its parameters' ids, the reason. What is left runs
through the same branches of the code.
"""

from __future__ import annotations

import re

_ROWS = (
    (
        "test_agent_budget.py::test_no_span_uses_more_than_its_share", "^[123]-",
        "more draws of the same machine",
    ),
    (
        "test_agent_history.py::test_a_damaged_segment_is_put_aside_when_it_is_to_be_merged", "",
        "damaged segments are left out in tests that read them",
    ),
    (
        "test_agent_history.py::test_the_history_leads_to_the_same_collectives_as_the_packets",
        "egress|reduce-n6|groups|mpi|nccl",
        "segments hold messages, whatever library sent them; a Gloo job is left",
    ),
    (
        "test_agent_limits.py::test_in_a_flood_the_agent_settles_at_its_limits", "",
        "150 drawn worlds of eight minutes; the one that once failed has a test of its own",
    ),
    (
        "test_agent_live.py::test_a_clock_that_is_set_while_it_runs", "^messages$",
        "packets are left; messages' times are moved by the same rule (tests/test_stamps_live.py)",
    ),
    (
        "test_agent_live.py::test_a_flood_costs_detail_and_detail_comes_back", "",
        "what is kept in a flood is tested without packets (tests/test_agent_limits.py)",
    ),
    (
        "test_agent_live.py::test_a_full_disk_stops_the_history_until_there_is_space", "",
        "a full disk is met in tests/test_agent_history.py and by a capture",
    ),
    (
        "test_agent_live.py::test_jobs_may_start_stop_and_start_again", "",
        "three live jobs in turn; one is left",
    ),
    (
        "test_agent_live.py::test_nothing_stays_attached", "^2$",
        "the agent's end by SIGKILL is left; by SIGINT a capture's is",
    ),
    (
        "test_agent_told.py::test_every_panel_has_data_on_one_live_node", "",
        "a live job and Prometheus; each panel is asked for with a scripted agent (test_agent_prometheus.py)",
    ),
    (
        "test_agent_told.py::test_a_rank_that_turns_late_is_told_by_all_outlets", "",
        "a live job by all outlets and Prometheus; a live job without is left, each outlet has tests",
    ),
    (
        "test_agent_windows.py::test_a_clock_that_is_set_loses_nothing",
        "egress|reduce-n6|groups|mpi|nccl.*--1|gloo.*[^-]-1$|nccl-(alltoall|ddp|h|pat|pipe|tree|sockets)",
        "a clock is moved by the same code whatever the packets carry; TCP set back and RoCE set "
        "forward are left",
    ),
    (
        "test_agent_windows.py::test_a_rank_that_turns_late_is_told_within_five_seconds", "^30$",
        "lateness of 100 ms is left",
    ),
    (
        "test_agent_windows.py::test_each_collective_is_published_once_and_as_the_whole_capture_has_it",
        "^1.0-|0.3-(mpi-(all|iall)|gloo-(egress|reduce|groups)"
        "|nccl-(alltoall|ddp|h|pat|pipeline-n3|tree|sockets-(m|ring|t)))",
        "the same captures in fewer steps, and more jobs of the libraries that are left",
    ),
    (
        "test_agent_windows.py::test_messages_are_the_same_however_often_finished_ones_are_let_go",
        "ucx|libfabric",
        "Open MPI's own messages are left; these have more of them",
    ),
    (
        "test_agent_windows.py::test_what_is_held_is_bounded_by_the_span",
        "egress|reduce-n6|groups|mpi|nccl-(allreduce|ddp|h|pat|pipeline-n3|tree|alltoall|sockets-(m|ring|t))",
        "other jobs of the libraries that are left; NCCL over sockets and over RoCE and a Gloo job are",
    ),
    (
        "test_ahead.py::test_a_wire_that_is_still_busy_hides_no_late_gpu_over_sockets", "",
        "over RoCE it is left",
    ),
    (
        "test_analysis.py::test_evidence_is_what_wireshark_shows", "^gloo",
        "a start of tshark for each finding; an Open MPI job is left",
    ),
    (
        "test_analysis.py::test_one_node_alone_blames_nobody_wrongly", "mpi-.*-[23]$",
        "two of four nodes are left of this job, all of the other",
    ),
    (
        "test_analysis.py::test_one_node_not_captured", "mpi-.*-[23]$",
        "two of four nodes are left of this job, all of the other",
    ),
    (
        "test_arcs.py::test_rings_from_some_nodes",
        "^(?!.*(1000000|600000, protocol: ll-)).*only[13]$|20000000|ll128|only4",
        "which nodes are captured is tried with two of the operations, each operation with two choices",
    ),
    (
        "test_bench.py::test_dpuflow_agrees", "^(pcapng-1|pcap-2)",
        "each format and each number of threads once is left",
    ),
    (
        "test_bench.py::test_pcapng_holds_the_same", "",
        "a thousand packets through tshark twice",
    ),
    (
        "test_bench.py::test_python_peers_agree", "^scapy",
        "scapy is a comparison of speed; dpkt and tshark are left",
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
        "test_bench_accuracy.py::test_nobody_is_blamed_for_the_network", "^4(001|171|160)$",
        "three more scenarios of the same kind",
    ),
    (
        "test_bench_accuracy.py::test_the_sweep_tells_a_decode_rank_that_is_ten_microseconds_late", "",
        "the sweep of the bench itself; one decode with a late rank is left",
    ),
    (
        "test_boundaries.py::test_cuts_are_the_most_that_was_complete_by_a_time", "[1-9]$",
        "more draws; every tenth is left",
    ),
    (
        "test_bpf_objects.py::test_one_object_fits_all_processors", "^(messages|packets_hardware)",
        "programs are compiled twice each; one with and one without hardware stamps are left",
    ),
    (
        "test_buffers.py::test_simple_with_other_buffers", "^8388608-|^16777216",
        "the largest buffers; two smaller ones are left",
    ),
    (
        "test_bulk.py::test_caches_between_hosts_that_stall", "^read$",
        "caches that are written are left",
    ),
    (
        "test_bulk.py::test_caches_that_nobody_waits_for_are_no_bottleneck", "",
        "caches that are waited for are left",
    ),
    (
        "test_bulk.py::test_caches_that_queue_behind_one_slow_link_are_told_apart", "job[12]",
        "two more jobs of the same kind",
    ),
    (
        "test_bulk.py::test_notices_are_not_taken_for_what_a_library_answers", "",
        "one more way to end a transfer",
    ),
    (
        "test_bulk.py::test_transfers_are_those_of_the_truth", "job[12456]",
        "more jobs; one of each way to move a cache is left",
    ),
    (
        "test_capture.py::test_damaged_gzip_gives_the_same_by_either_library", "[1-9]$",
        "more places; every tenth is left",
    ),
    (
        "test_capture_live.py::test_a_loopback_has_each_packet_once", "^clsact$",
        "an older way to attach the same program",
    ),
    (
        "test_capture_live.py::test_nothing_stays_attached_after_sigkill", "^(clsact|xdp-generic)$",
        "older ways to attach",
    ),
    (
        "test_capture_live.py::test_the_file_equals_tcpdumps", "^(clsact|xdp-generic|bcc)$",
        "older ways to attach the same programs",
    ),
    (
        "test_capture_live.py::test_what_is_addressed_to_others_is_taken_from_several_interfaces",
        "^afpacket$",
        "eBPF is left",
    ),
    (
        "test_churn.py::test_the_owner_of_memory_that_caches_are_moved_to_or_from", "^(None-write|3000-read)",
        "each side once, with and without rebuilt registrations",
    ),
    (
        "test_cli.py::test_streams_that_the_caller_has_closed", "",
        "a process for each option that writes; one sentence for all",
    ),
    (
        "test_credited.py::test_communicators_with_as_many_messages", "faults",
        "the same job with a slow link",
    ),
    (
        "test_credited.py::test_ring_of_nccl", "bytes: (20000000|9000000)-",
        "the same ring with more bytes",
    ),
    (
        "test_credited.py::test_rings_that_gather_and_scatter_in_turns", "4194304",
        "the same rings with more bytes",
    ),
    (
        "test_credited.py::test_two_operations_that_take_turns_are_not_one", "^8-|^4-1048576",
        "more nodes, and larger buffers",
    ),
    (
        "test_cut_entries.py::test_cut_entries_are_said", "^erspan-True|^vxlan",
        "one tunnel is left",
    ),
    (
        "test_cut_entries.py::test_the_length_that_is_named_does", "^erspan",
        "the other tunnel is left",
    ),
    (
        "test_distances.py::test_pat_from_some_nodes", "-[678]-",
        "groups of four and five are left",
    ),
    (
        "test_doca.py::test_copies_are_the_packets_and_production_goes_on", "^(?!2.7-mirror|3.3-flood)",
        "one release of each way to copy is left",
    ),
    (
        "test_doca.py::test_copies_to_a_port", "^(?!3.3)",
        "the newest release is left",
    ),
    (
        "test_doca.py::test_killed_in_any_call_it_leaves_production", "^(?!3.3)",
        "the newest release is left",
    ),
    (
        "test_doca.py::test_killed_while_it_captures", "",
        "death in any call is left, where rules go and where they stay; files of killed captures in "
        "test_messages_live.py",
    ),
    (
        "test_doca.py::test_lost_in_the_queue_is_what_the_card_dropped", "3.2$|True",
        "the release that counts otherwise is left",
    ),
    (
        "test_doca.py::test_production_by_the_kernel", "^(?!3.3)",
        "the newest release is left",
    ),
    (
        "test_doca.py::test_protocols", "^2.5$",
        "the newest release is left",
    ),
    (
        "test_doca.py::test_queue_pairs", "^2.7",
        "the newest release is left",
    ),
    (
        "test_doca.py::test_sampling_by_the_card", "^(?!3.3)",
        "the newest release is left",
    ),
    (
        "test_doca.py::test_stamps", "^2.7",
        "the newest release is left",
    ),
    (
        "test_doca.py::test_the_simulator_refuses_what_the_library_refuses", "^(?!2.7)",
        "a release that is compiled without sanitizers is left",
    ),
    (
        "test_doca.py::test_what_is_lost_is_counted", "^2.7",
        "the newest release is left",
    ),
    (
        "test_doca.py::test_whichever_call_fails_production_goes_on_and_nothing_leaks", "^(?!2.7-sf7)",
        "sanitizers take a compilation each; one release without is left",
    ),
    (
        "test_doctor.py::test_without_btf_all_goes_on", "",
        "a kernel of its own kind; stamps without BTF are left",
    ),
    (
        "test_figures.py::test_operations_of_a_rank_that_is_late", "",
        "a sound job's operations are left",
    ),
    (
        "test_figures.py::test_what_another_algorithm_makes_of_it", "^8-1-|^4-2-",
        "recursive doubling of four ranks is left",
    ),
    (
        "test_figures.py::test_what_loss_takes_of_the_slowest_steps", "",
        "forty steps twice, for a percentile; how long losses held messages up is tested by itself",
    ),
    (
        "test_filters_live.py::test_vlan_tags_stay_where_they_were", "xdp|afpacket",
        "one way to attach is left; what is kept of packets is tested with all",
    ),
    (
        "test_fuzz_found.py::test_thousands_of_addresses_have_no_schedules_of_as_many_squared", "",
        "a bound on time and memory at thousands of addresses",
    ),
    (
        "test_fuzz_reader.py::test_damaged_random_captures", "",
        "damaged public captures and random packets are left, and the corpus of what fuzzing found",
    ),
    (
        "test_hidden.py::test_a_slow_way_makes_bounds_of_what_it_brings", "^1$",
        "another node",
    ),
    (
        "test_hops.py::test_rings_over_nodes_seen_in_part",
        "^(?!.*61440).*-(3-8-8|4-4-2|5-2-2|4-2-2)-|1999984|-3-2-4-",
        "the largest clusters are tried with one operation, all operations with smaller ones",
    ),
    (
        "test_hops.py::test_what_is_not_understood_is_not_told_in_parts", "",
        "24 GPUs; rings over nodes seen in part are left",
    ),
    (
        "test_hosts.py::test_a_node_that_is_slow_to_answer_reads", "",
        "a cluster and its hosts; a node that passes on slowly is left",
    ),
    (
        "test_hosts.py::test_a_node_that_passes_on_slowly", "^400.0$",
        "a sound one beside it",
    ),
    (
        "test_hosts.py::test_an_answer_behind_other_data_and_jitter_within_the_clocks_error_are_nobodys_fault",
        "",
        "a cluster of eight nodes; sound hosts are left in other tests",
    ),
    (
        "test_hosts.py::test_prompts_that_lie_there_while_ranks_stand_still", "^0$",
        "ranks that do not stand still",
    ),
    (
        "test_interfaces_live.py::test_the_agent_goes_on_with_a_renamed_interface", "",
        "a capture from a renamed interface is left",
    ),
    (
        "test_islands.py::test_a_ring_over_all_rails_is_one_operation", "^(0|-40000000000)$",
        "other distances of two clocks; one of some milliseconds is left",
    ),
    (
        "test_islands.py::test_trees_over_nodes_name_the_node", "",
        "64 captures; rails with a late rank are left",
    ),
    (
        "test_join_real.py::test_clocks_that_are_set_or_slewed_in_mid_capture", "-1$|--1000000000|--0.0005",
        "the other of two nodes' clocks, and the other way",
    ),
    (
        "test_judgement.py::test_noise_makes_nobody_late", "",
        "statistics over many draws",
    ),
    (
        "test_kept.py::test_what_is_kept_takes_no_more_memory_than_is_said", "",
        "a bound on memory over groups of many sizes: every allocation is traced",
    ),
    (
        "test_last_candidates.py::test_one_late_call_of_a_busy_host_is_no_lateness", "",
        "statistics over forty calls",
    ),
    (
        "test_last_candidates.py::test_the_scatter_of_a_single_known_entry_is_not_nothing", "",
        "statistics over many calls",
    ),
    (
        "test_lateness.py::test_charges_never_exceed_the_true_waiting", "^(100|200|300)$",
        "more draws of random worlds",
    ),
    (
        "test_lateness.py::test_what_is_said_of_random_worlds_is_true", "^(50|100|150|200|250|350)$",
        "more draws of random worlds",
    ),
    (
        "test_later_steps.py::test_the_step_at_which_a_ring_stalls_tells_who_was_late", "^[0123]$",
        "each of five ranks late: the last is left",
    ),
    (
        "test_layouts.py::test_recognised", "-(64-2-told5|33-1-told8|8-2-told10|7-4-told2)$",
        "the largest groups of trees and PAT; smaller ones are left",
    ),
    (
        "test_layouts.py::test_what_is_said_of_lateness_holds", "fault[1234]$",
        "other faults; one of each kind of message is left",
    ),
    (
        "test_loading.py::test_damaged_results_are_refused_or_read", "^[234]$",
        "more draws of damage",
    ),
    (
        "test_lost.py::test_collectives_are_found_although_captures_lost_packets", "^6-0.001-|4000000",
        "larger buffers; LL is left",
    ),
    (
        "test_malformed.py::test_as_many_packets_as_tshark_finds", "",
        "a start of tshark for each file; what is read of each is asserted without it",
    ),
    (
        "test_memory_bound.py::test_no_shape_takes_more", "^(?!hub)",
        "a process each; the one that once took the most is left",
    ),
    (
        "test_memory_bound.py::test_streams_of_tiny_messages_become_bursts_and_that_is_said", "",
        "600,000 of them; smaller floods are in the corpus",
    ),
    (
        "test_messages_live.py::test_rocev1_is_folded_as_v2_is", "tcx",
        "the program is the same at either hook",
    ),
    (
        "test_messages_live.py::test_the_same_messages_as_from_packets", "^nccl-.*tcx|^gloo-.*(xdp|afpacket)",
        "each hook is left once, each transport too",
    ),
    (
        "test_messages_live.py::test_with_losses_marks_and_reads", "^nccl|^ar-",
        "marks and reads are left; loss is told by the same numbers as in captures",
    ),
    (
        "test_mid_job.py::test_nothing_is_invented",
        "^apart-(tree|queue pairs|adaptive)$|^together-(queue pairs|adaptive)",
        "other layouts of connections are left with captures that begin together",
    ),
    (
        "test_mid_job.py::test_several_communicators", "",
        "a job of several communicators; one is dated in mid-job by what is left",
    ),
    (
        "test_mid_job.py::test_whole_operations_are_dated", "apart|fifth",
        "captures that begin together are left, and one that begins later",
    ),
    (
        "test_mirror_live.py::test_after_a_kill_the_next_one_or_doctor_undoes_it", "",
        "ends of other kinds are left",
    ),
    (
        "test_nccl_real.py::test_operations_and_who_is_late", "tpdp|sockets-ring",
        "several communicators over sockets take seconds; experts over sockets and five jobs are left",
    ),
    (
        "test_nccl_sockets.py::test_operations", "bytes: 7000-|tree|pat-",
        "trees and PAT over sockets are left as programs",
    ),
    (
        "test_nccl_sockets.py::test_operations_from_some_nodes", "only[123]$|algorithm: tree",
        "other choices of captured nodes: one that is alone is left, trees as programs",
    ),
    (
        "test_nccl_sockets.py::test_programs",
        "^((rings|several|sharded)-.*-persistent|(rings|lines|trees|blocks)-.*-random|several-|trees-2|sharded)",
        "each way to begin in mid-job is left, and most programs",
    ),
    (
        "test_offload_live.py::test_every_byte_is_told_once", "clsact|segments-9000|offloaded-1500",
        "one hook, and either size once",
    ),
    (
        "test_onset.py::test_the_onset_is_within_three_steps", "^(slow_link-3|head_of_line)",
        "the same function finds all onsets; a slow link, losses and marks are left",
    ),
    (
        "test_oracle_tshark.py::test_bundled_captures",
        "^(?!gloo-allreduce-n4|mpi-barrier|nccl-(allreduce|sockets-moe))",
        "a start of tshark each; a job of each library and transport is left",
    ),
    (
        "test_oracle_tshark.py::test_every_shape_of_pcapng", "",
        "a start of tshark for each of 25 files; the reader's own tests read them",
    ),
    (
        "test_oracle_tshark.py::test_needless_tcp_repeats_are_those_that_tshark_sees_acknowledged",
        "^net_loss|node1$|offload",
        "more captures with loss",
    ),
    (
        "test_oracle_tshark.py::test_public_others", "pcapplusplus|zeek|geneve|type-iii|gso-ipv6|PKTAP",
        "a start of tshark each; two of each kind of file are left",
    ),
    (
        "test_oracle_tshark.py::test_public_roce", "rxe|huawei",
        "other captures of the kind that is left",
    ),
    (
        "test_oracle_tshark.py::test_real_captures", "",
        "a start of tshark for each of 39 files; the bundled ones are left",
    ),
    (
        "test_oracle_tshark.py::test_roce_inside", "(vxlan|gre|GRE|ERSPAN|IPv4) |with options|QinQ",
        "tunnels in tunnels, tags behind tags; each kind of tunnel and a tag are left",
    ),
    (
        "test_other_waits.py::test_a_slow_link_is_no_late_gpu", "^job1-8-",
        "eight ranks instead of four",
    ),
    (
        "test_p2p.py::test_channels_that_lost_packets_hold_up_are_one_transfer", "",
        "loss on channels; sound ones are left",
    ),
    (
        "test_page_browser.py::test_five_thousand_ranks_fit_on_a_page", "",
        "one large page in a browser; how large a page becomes is left (test_html.py)",
    ),
    (
        "test_p2p.py::test_calls_of_one_message_each_among_many_on_a_busy_host", "^665$",
        "another draw",
    ),
    (
        "test_page_browser.py::test_it_prints_on_a4", "",
        "a browser that prints; what a page shows on screens is left",
    ),
    (
        "test_partial_capture.py::test_a_ring_seen_at_one_rank_is_no_pipeline", "",
        "a capture of 27 s; what one node tells of rings is tested with shorter ones",
    ),
    (
        "test_partial_capture.py::test_losses_between_others_are_no_single_incidents_of_a_gpu", "^nccl",
        "the same over a fabric is left",
    ),
    (
        "test_partial_capture.py::test_what_one_node_tells_leaves_no_room_for_the_hosts_of_others", "",
        "two jobs scored whole; single rules are left",
    ),
    (
        "test_partial_capture.py::test_who_only_waited_for_another_group_is_not_named", "^[02]$",
        "two of four nodes are left",
    ),
    (
        "test_plain.py::test_plain_python_says_what_compiled_kernels_say",
        "^(gloo|mpi-i?all|nccl-(allreduce|alltoall|ddp|halo|pat|pipe|tree|sockets-[rt]))",
        "a tenth of the kernels' speed; a job of Open MPI, NCCL on a host and over sockets are left",
    ),
    (
        "test_ports.py::test_a_slow_link_is_no_others_traffic", "",
        "a sound port beside others' traffic is left",
    ),
    (
        "test_ports.py::test_a_slow_port_where_no_other_pair_does_the_same", "^1-100$",
        "a port that is not slow",
    ),
    (
        "test_program.py::test_uneven_all_to_alls_between_rings_of_odd_shares", "^5-False|^4-False-linear",
        "four ranks without tags are left",
    ),
    (
        "test_pxn.py::test_calls_with_few_slots_are_cut_where_entries_come_together", "",
        "larger calls; small ones are left",
    ),
    (
        "test_rails.py::test_rings", "90000000|60000000|4800000-|3000000",
        "more loops and channels of operations that are left",
    ),
    (
        "test_ready.py::test_a_library_for_any_processor_has_the_same_bytes_each_time", "",
        "two compilations; `make dist` builds it",
    ),
    (
        "test_recorded.py::test_real_traces_are_read", "world(2|16)",
        "traces of megabytes; a small one is left",
    ),
    (
        "test_records.py::test_memory_does_not_follow_the_file", "^2$",
        "one thread is left",
    ),
    (
        "test_records.py::test_threads_when_sections_and_statistics_come_between", "",
        "sixty sections of a large file; threads are left in classic and plain pcapng",
    ),
    (
        "test_repeated.py::test_the_late_rank_of_captures_without_any_names",
        "gloo_(mixed|barrier|hybrid|alltoall|broadcast|allreduce_1m)|slowlink",
        "two of nine captures are left",
    ),
    (
        "test_replicas.py::test_a_slow_link_is_no_stage_that_computes_longer", "",
        "a pipeline of its own; stages that compute longer are left",
    ),
    (
        "test_replicas.py::test_ranks_of_a_stage_that_reduce_between_its_transfers_are_no_replicas", "",
        "a pipeline of its own",
    ),
    (
        "test_replicas.py::test_the_stage_that_computes_longer", "socket|^4-ib",
        "how sockets are read is tested without replicas; one of the stages over RoCE is left",
    ),
    (
        "test_requests.py::test_clients_are_no_ranks_and_one_capture_is_enough", "",
        "a service captured once more; requests and ranks are told apart in what is left",
    ),
    (
        "test_requests.py::test_front_ends_are_compared_though_nothing_ties_their_clocks", "even",
        "front ends that are alike; those that are not are left",
    ),
    (
        "test_requests.py::test_what_clients_suffer_is_named",
        "",
        "each of seven conditions takes a service and its clients; a backlog and losses at once are left",
    ),
    (
        "test_sampled.py::test_a_sample_is_told_by_its_numbers", "^job[03]-2-|^job4",
        "one packet of eight or 64 is left",
    ),
    (
        "test_sampled.py::test_what_a_capture_lost_is_no_sample", "^socket-|^ib-0.25",
        "one transport is left",
    ),
    (
        "test_sequenced.py::test_every_algorithm_is_cut_and_named", "rendezvous",
        "eager messages are left: the same schedules",
    ),
    (
        "test_significance.py::test_busy_hosts_that_are_alike_are_not_called_persistently_late", "",
        "statistics over many draws",
    ),
    (
        "test_slow_sockets.py::test_sends_that_end_with_a_rest_are_parted_by_it", "",
        "a pipeline's thousands of chunks; two ranks and a chain over slow sockets are left",
    ),
    (
        "test_slow_sockets.py::test_what_no_pause_parts_is_no_all_clear", "^[3-6]$",
        "four more draws",
    ),
    (
        "test_spray.py::test_overtaking_is_no_loss", "cluster[1-4]",
        "one of five ways to spray is left",
    ),
    (
        "test_stalls.py::test_bounds_hold", "job0-2",
        "another draw",
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
        "test_stalls.py::test_transfers_that_stalls_cut_up", "",
        "a loaded host's transfers; what stalls do to bounds is left",
    ),
    (
        "test_stamps.py::test_absurd_stamps_alone", "",
        "stamps that are all absurd; some among sound ones are left",
    ),
    (
        "test_stamps_live.py::test_stamps_are_tcpdumps_where_the_kernel_stamps", "^clsact$",
        "an older way to attach",
    ),
    (
        "test_steps.py::test_pauses_too_weak_to_tell_are_not_told_at_twice_their_distance", "",
        "two hundred drawn jobs; steps that pauses tell are left",
    ),
    (
        "test_steps.py::test_pauses_that_are_all_alike_are_no_steps", "^60$",
        "longer runs of pauses",
    ),
    (
        "test_structured.py::test_jobs_one_after_the_other_with_other_peers_are_two", "",
        "two jobs in one capture",
    ),
    (
        "test_synth_case.py::test_every_icrc_is_right", "congestion|notices|reads",
        "ICRCs of the same builders' packets, by the thousand",
    ),
    (
        "test_synth_case.py::test_stamps_are_in_order_and_both_ends_saw_the_same_frames",
        "congestion|reads (lost|with)",
        "larger jobs",
    ),
    (
        "test_synth_case.py::test_tshark_has_no_complaint",
        "congestion|notices|reads|loss|atomics|doubling|simple|routed|acks|mtu|2.18",
        "a start of tshark for each node; two kinds of job are left",
    ),
    (
        "test_synth_requests.py::test_every_prompt_has_its_answer", "False",
        "requests that come apart",
    ),
    (
        "test_synth_requests.py::test_tshark_finds_no_gap_and_nothing_acknowledged_that_was_not_sent", "",
        "tshark on each node's capture; what is sent is tested without it",
    ),
    (
        "test_synth_sockets.py::test_tshark_finds_every_checksum_right_and_no_gap", "",
        "a start of tshark for each node",
    ),
    (
        "test_synth_stream.py::test_tshark_names_what_was_sent_again", "",
        "tshark on three captures with loss; that all comes in the end is tested without it",
    ),
    (
        "test_synth_world.py::test_a_full_queue_pauses_its_senders_and_loses_nothing", "",
        "a thousand packets through one queue, played whole",
    ),
    (
        "test_tcp_captures.py::test_both_ends_saw_the_same_gloo_messages", "ddp|mixed|4k|1m|loss",
        "smaller captures are left",
    ),
    (
        "test_workers.py::test_the_bytes_are_those_of_one_process", "sockets|groups",
        "RoCE and TCP together are left with a smaller job",
    ),
)  # fmt: skip
LONGER = {test: (re.compile(pattern), why) for test, pattern, why in _ROWS}
