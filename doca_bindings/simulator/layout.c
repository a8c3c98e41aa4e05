/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes and places of the release's structs, as they were read from the real headers of 2.5, 2.7 and 3.3. */
#include <stddef.h>

#include <doca_flow.h>

#define SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type)
#define PLACE(type, field, at) _Static_assert(offsetof(struct type, field) == (at), #type "." #field)
#define IS(name, value) _Static_assert((int)(name) == (value), #name)

SIZE(doca_flow_fwd, 40);
PLACE(doca_flow_fwd, port_id, 8);
PLACE(doca_flow_fwd, next_pipe, 8);
SIZE(doca_flow_query, 16);
PLACE(doca_flow_query, total_pkts, 8);
PLACE(doca_flow_monitor, counter_type, 32);
PLACE(doca_flow_monitor, shared_counter, 36);
IS(DOCA_FLOW_FWD_TARGET, 5);
IS(DOCA_FLOW_PIPE_HASH, 6);

#if SIMULATED == 205
SIZE(doca_flow_match, 496);
PLACE(doca_flow_match, parser_meta, 40);
PLACE(doca_flow_match, outer, 80);
PLACE(doca_flow_match, tun, 156);
PLACE(doca_flow_match, inner, 420);
SIZE(doca_flow_header_format, 76);
PLACE(doca_flow_header_format, l4_type_ext, 64);
SIZE(doca_flow_parser_meta, 40);
SIZE(doca_flow_monitor, 56);
PLACE(doca_flow_monitor, shared_mirror_id, 40);
PLACE(doca_flow_monitor, aging_sec, 48);
SIZE(doca_flow_mirror_target, 384);
PLACE(doca_flow_mirror_target, fwd, 344);
SIZE(doca_flow_cfg, 96);
SIZE(doca_flow_port_cfg, 32);
SIZE(doca_flow_pipe_cfg, 112);
IS(DOCA_FLOW_SHARED_RESOURCE_MIRROR, 4);
#elif SIMULATED == 207
SIZE(doca_flow_match, 520);
PLACE(doca_flow_match, parser_meta, 40);
PLACE(doca_flow_match, outer, 88);
PLACE(doca_flow_match, tun, 168);
PLACE(doca_flow_match, inner, 440);
SIZE(doca_flow_header_format, 80);
PLACE(doca_flow_header_format, l4_type_ext, 68);
SIZE(doca_flow_parser_meta, 48);
SIZE(doca_flow_monitor, 48);
PLACE(doca_flow_monitor, shared_mirror_id, 40);
PLACE(doca_flow_monitor, aging_sec, 44);
SIZE(doca_flow_mirror_target, 400);
PLACE(doca_flow_mirror_target, fwd, 360);
IS(DOCA_FLOW_SHARED_RESOURCE_MIRROR, 3);
IS(DOCA_FLOW_FWD_CHANGEABLE, 7);
#elif SIMULATED == 303
SIZE(doca_flow_meta, 44);
SIZE(doca_flow_parser_meta, 44);
PLACE(doca_flow_parser_meta, outer_l3_type, 12);
PLACE(doca_flow_match, parser_meta, 44);
PLACE(doca_flow_match, outer, 88);
SIZE(doca_flow_monitor, 48);
PLACE(doca_flow_monitor, aging_sec, 40);
PLACE(doca_flow_fwd, rss, 16);
PLACE(doca_flow_fwd, hash_pipe.algorithm, 16);
SIZE(doca_flow_resource_rss_cfg, 24);
IS(DOCA_FLOW_FWD_HASH_PIPE, 7);
IS(DOCA_FLOW_FWD_CHANGEABLE, 100);
IS(DOCA_FLOW_ENTRY_FLAGS_NO_WAIT, 1);
IS(DOCA_FLOW_PIPE_HASH_MAP_ALGORITHM_FLOODING, 16);
IS(DOCA_FLOW_METER_COLOR_RED, 0);
IS(DOCA_FLOW_L2_META_SINGLE_VLAN, 2);
#endif

#if SIMULATED < 302
SIZE(doca_flow_resource_mirror_cfg, 56);
PLACE(doca_flow_resource_mirror_cfg, fwd, 16);
PLACE(doca_flow_shared_resource_cfg, mirror_cfg, 8);
#endif
