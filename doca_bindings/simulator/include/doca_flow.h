/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Written for dpuflow's simulator: what dpuflow uses of DOCA Flow's documented interface, with the signatures, values
 * and layouts of each release (doca_version.h says which). No text of NVIDIA's.
 */
#ifndef SIMULATED_DOCA_FLOW_H
#define SIMULATED_DOCA_FLOW_H

#include <stdbool.h>
#include <stdint.h>

#include <doca_error.h>
#include <doca_flow_net.h>
#include <doca_version.h>

struct doca_dev;
struct doca_dev_rep;
struct doca_flow_pipe;
struct doca_flow_pipe_entry;
struct doca_flow_port;
struct doca_flow_target;

/* -- values ------------------------------------------------------------------------------------ */

#if SIMULATED < 207
enum doca_flow_shared_resource_type {
	DOCA_FLOW_SHARED_RESOURCE_METER,
	DOCA_FLOW_SHARED_RESOURCE_COUNT,
	DOCA_FLOW_SHARED_RESOURCE_RSS,
	DOCA_FLOW_SHARED_RESOURCE_CRYPTO,
	DOCA_FLOW_SHARED_RESOURCE_MIRROR,
	DOCA_FLOW_SHARED_RESOURCE_MAX,
};
#elif SIMULATED < 302
enum doca_flow_shared_resource_type {
	DOCA_FLOW_SHARED_RESOURCE_METER,
	DOCA_FLOW_SHARED_RESOURCE_COUNTER,
	DOCA_FLOW_SHARED_RESOURCE_RSS,
	DOCA_FLOW_SHARED_RESOURCE_MIRROR,
	DOCA_FLOW_SHARED_RESOURCE_PSP,
	DOCA_FLOW_SHARED_RESOURCE_ENCAP,
	DOCA_FLOW_SHARED_RESOURCE_DECAP,
	DOCA_FLOW_SHARED_RESOURCE_IPSEC_SA,
};
#endif

#if SIMULATED < 303
enum doca_flow_flags_type {
	DOCA_FLOW_NO_WAIT = 0,
	DOCA_FLOW_WAIT_FOR_BATCH = 1,
};
#else
enum doca_flow_entry_flags {
	DOCA_FLOW_ENTRY_FLAGS_NO_WAIT = 1,
	DOCA_FLOW_ENTRY_FLAGS_WAIT_FOR_BATCH = 2,
};
#endif

enum doca_flow_entry_op {
	DOCA_FLOW_ENTRY_OP_ADD,
	DOCA_FLOW_ENTRY_OP_DEL,
	DOCA_FLOW_ENTRY_OP_UPD,
	DOCA_FLOW_ENTRY_OP_AGED,
};

enum doca_flow_entry_status {
	DOCA_FLOW_ENTRY_STATUS_IN_PROCESS,
	DOCA_FLOW_ENTRY_STATUS_SUCCESS,
	DOCA_FLOW_ENTRY_STATUS_ERROR,
};

enum doca_flow_pipe_type {
	DOCA_FLOW_PIPE_BASIC,
	DOCA_FLOW_PIPE_CONTROL,
	DOCA_FLOW_PIPE_LPM,
	DOCA_FLOW_PIPE_CT,
	DOCA_FLOW_PIPE_ACL,
	DOCA_FLOW_PIPE_ORDERED_LIST,
	DOCA_FLOW_PIPE_HASH,
};

enum doca_flow_pipe_domain {
	DOCA_FLOW_PIPE_DOMAIN_DEFAULT = 0,
	DOCA_FLOW_PIPE_DOMAIN_SECURE_INGRESS,
	DOCA_FLOW_PIPE_DOMAIN_EGRESS,
	DOCA_FLOW_PIPE_DOMAIN_SECURE_EGRESS,
};

enum doca_flow_target_type {
	DOCA_FLOW_TARGET_KERNEL,
};

enum doca_flow_fwd_type {
	DOCA_FLOW_FWD_NONE = 0,
	DOCA_FLOW_FWD_RSS,
	DOCA_FLOW_FWD_PORT,
	DOCA_FLOW_FWD_PIPE,
	DOCA_FLOW_FWD_DROP,
	DOCA_FLOW_FWD_TARGET,
	DOCA_FLOW_FWD_ORDERED_LIST_PIPE,
#if SIMULATED >= 301
	DOCA_FLOW_FWD_HASH_PIPE,
	DOCA_FLOW_FWD_CHANGEABLE = 100,
#elif SIMULATED >= 207
	DOCA_FLOW_FWD_CHANGEABLE,
#endif
};

enum doca_rss_type {
	DOCA_FLOW_RSS_IPV4 = 1 << 0,
	DOCA_FLOW_RSS_IPV6 = 1 << 1,
	DOCA_FLOW_RSS_UDP = 1 << 2,
	DOCA_FLOW_RSS_TCP = 1 << 3,
};

enum doca_flow_rss_hash_function {
	DOCA_FLOW_RSS_HASH_FUNCTION_TOEPLITZ,
	DOCA_FLOW_RSS_HASH_FUNCTION_SYMMETRIC_TOEPLITZ,
};

#if SIMULATED >= 301
enum doca_flow_pipe_hash_map_algorithm {
	DOCA_FLOW_PIPE_HASH_MAP_ALGORITHM_HASH = 1,
	DOCA_FLOW_PIPE_HASH_MAP_ALGORITHM_RANDOM = 2,
	DOCA_FLOW_PIPE_HASH_MAP_ALGORITHM_IDENTITY = 4,
	DOCA_FLOW_PIPE_HASH_MAP_ALGORITHM_ROUND_ROBIN = 8,
	DOCA_FLOW_PIPE_HASH_MAP_ALGORITHM_FLOODING = 16,
};
#endif

enum doca_flow_resource_type {
	DOCA_FLOW_RESOURCE_TYPE_NONE,
	DOCA_FLOW_RESOURCE_TYPE_SHARED,
	DOCA_FLOW_RESOURCE_TYPE_NON_SHARED,
};

enum doca_flow_meter_limit_type {
	DOCA_FLOW_METER_LIMIT_TYPE_BYTES = 0,
	DOCA_FLOW_METER_LIMIT_TYPE_PACKETS,
};

#if SIMULATED >= 303
enum __attribute__((__packed__)) doca_flow_meter_color {
	DOCA_FLOW_METER_COLOR_RED = 0,
	DOCA_FLOW_METER_COLOR_YELLOW,
	DOCA_FLOW_METER_COLOR_GREEN,
};

enum doca_flow_l2_meta {
	DOCA_FLOW_L2_META_NO_VLAN = 0,
	DOCA_FLOW_L2_META_MULTI_VLAN,
	DOCA_FLOW_L2_META_SINGLE_VLAN,
};
#else
enum __attribute__((__packed__)) doca_flow_meter_color {
	DOCA_FLOW_METER_COLOR_GREEN = 0,
	DOCA_FLOW_METER_COLOR_YELLOW,
	DOCA_FLOW_METER_COLOR_RED,
};

enum doca_flow_l2_meta {
	DOCA_FLOW_L2_META_NO_VLAN = 0,
	DOCA_FLOW_L2_META_SINGLE_VLAN,
	DOCA_FLOW_L2_META_MULTI_VLAN,
};
#endif

enum doca_flow_l3_meta {
	DOCA_FLOW_L3_META_NONE = 0,
	DOCA_FLOW_L3_META_IPV4,
	DOCA_FLOW_L3_META_IPV6,
};

enum doca_flow_l4_meta {
	DOCA_FLOW_L4_META_NONE = 0,
	DOCA_FLOW_L4_META_TCP,
	DOCA_FLOW_L4_META_UDP,
	DOCA_FLOW_L4_META_ICMP,
	DOCA_FLOW_L4_META_ESP,
};

/* -- what is matched --------------------------------------------------------------------------- */

struct doca_flow_meta {
	uint32_t pkt_meta;
#if SIMULATED >= 301
	uint32_t u32[10];
#else
	uint32_t u32[7];
	uint32_t mark;
#endif
};

struct doca_flow_parser_meta {
#if SIMULATED >= 300
	uint16_t port_id;
	doca_be16_t random;
	uint8_t ipsec_syndrome;
	uint8_t ipsec_ar_syndrome;
	uint8_t psp_syndrome;
#elif SIMULATED >= 207
	uint32_t port_meta;
	uint16_t random;
	uint8_t ipsec_syndrome;
	uint8_t psp_syndrome;
#else
	uint32_t port_meta;
	uint16_t random;
	uint8_t ipsec_syndrome;
#endif
	enum doca_flow_meter_color meter_color;
	enum doca_flow_l2_meta outer_l2_type;
	enum doca_flow_l3_meta outer_l3_type;
	enum doca_flow_l4_meta outer_l4_type;
	enum doca_flow_l2_meta inner_l2_type;
	enum doca_flow_l3_meta inner_l3_type;
	enum doca_flow_l4_meta inner_l4_type;
#if SIMULATED >= 207
	uint8_t flags[10];
#else
	uint8_t flags[8];
#endif
};

struct doca_flow_header_format {
	struct doca_flow_header_eth eth;
	uint16_t l2_valid_headers;
	struct doca_flow_header_eth_vlan eth_vlan[2];
	enum doca_flow_l3_type l3_type;
	union {
		struct doca_flow_header_ip4 ip4;
		struct doca_flow_header_ip6 ip6;
	};
	enum doca_flow_l4_type_ext l4_type_ext;
	union {
		struct doca_flow_header_udp udp;
		struct doca_flow_header_tcp tcp;
		struct doca_flow_header_l4_port transport;
#if SIMULATED >= 303
		struct doca_flow_header_roce_v2 roce_v2;
#endif
	};
};

struct doca_flow_match {
#if SIMULATED < 301
	uint32_t flags;
#endif
	struct doca_flow_meta meta;
	struct doca_flow_parser_meta parser_meta;
	struct doca_flow_header_format outer;
	struct doca_flow_tun tun;
	struct doca_flow_header_format inner;
};

struct doca_flow_actions;

/* -- where packets go -------------------------------------------------------------------------- */

struct doca_flow_resource_rss_cfg {
	uint32_t outer_flags;
	uint32_t inner_flags;
	uint16_t *queues_array;
	int nr_queues;
	enum doca_flow_rss_hash_function rss_hash_func;
};

struct doca_flow_fwd {
	enum doca_flow_fwd_type type;
	union {
#if SIMULATED >= 209
		struct {
			enum doca_flow_resource_type rss_type;
			union {
				struct doca_flow_resource_rss_cfg rss;
				uint32_t shared_rss_id;
			};
		};
#else
		struct {
			uint32_t rss_outer_flags;
			uint32_t rss_inner_flags;
			uint16_t *rss_queues;
			int num_of_queues;
			uint32_t shared_rss_id;
			enum doca_flow_rss_hash_function rss_hash_func;
		};
#endif
		uint16_t port_id;
		struct doca_flow_pipe *next_pipe;
#if SIMULATED >= 301
		struct {
			struct doca_flow_pipe *pipe;
			uint32_t algorithm;
		} hash_pipe;
#endif
		struct doca_flow_target *target;
	};
};

struct doca_flow_monitor {
	enum doca_flow_resource_type meter_type;
	union {
		struct {
			enum doca_flow_meter_limit_type limit_type;
			uint64_t cir;
			uint64_t cbs;
		} non_shared_meter;
	};
	enum doca_flow_resource_type counter_type;
	union {
		struct {
			uint32_t shared_counter_id;
		} shared_counter;
	};
#if SIMULATED < 302
	uint32_t shared_mirror_id;
#endif
#if SIMULATED < 207
	bool aging_enabled;
#endif
	uint32_t aging_sec;
};

#if SIMULATED < 302
struct doca_flow_mirror_target {
	bool has_encap;
	struct {
		struct doca_flow_header_format outer;
		struct doca_flow_tun tun;
	} encap;
	struct doca_flow_fwd fwd;
};

struct doca_flow_resource_mirror_cfg {
	int nr_targets;
	struct doca_flow_mirror_target *target;
	struct doca_flow_fwd fwd;
};

struct doca_flow_shared_resource_cfg {
	enum doca_flow_pipe_domain domain;
	union {
		struct doca_flow_resource_rss_cfg rss_cfg;
		struct doca_flow_resource_mirror_cfg mirror_cfg;
	};
};
#endif

struct doca_flow_query {
	uint64_t total_bytes;
	uint64_t total_pkts;
};

#if SIMULATED >= 209
struct doca_flow_resource_query {
	union {
		struct doca_flow_query counter;
	};
};
#endif

/* -- settings ---------------------------------------------------------------------------------- */

typedef void (*doca_flow_entry_process_cb)(struct doca_flow_pipe_entry *entry, uint16_t queue,
					   enum doca_flow_entry_status status, enum doca_flow_entry_op op,
					   void *context);

#if SIMULATED < 207
struct doca_flow_cfg {
	uint64_t flags;
	uint16_t queues;
	struct {
		uint32_t nb_counters;
		uint32_t nb_meters;
	} resource;
	uint8_t nr_acl_collisions;
	const char *mode_args;
	uint32_t nr_shared_resources[DOCA_FLOW_SHARED_RESOURCE_MAX];
	uint32_t queue_depth;
	void (*pipe_process_cb)(void);
	doca_flow_entry_process_cb cb;
	void (*unbind_cb)(void);
	const uint8_t *rss_key;
	uint32_t rss_key_len;
};

enum doca_flow_port_type {
	DOCA_FLOW_PORT_DPDK_BY_ID,
};

struct doca_flow_port_cfg {
	uint16_t port_id;
	enum doca_flow_port_type type;
	const char *devargs;
	uint16_t priv_data_size;
	void *dev;
};

struct doca_flow_pipe_attr {
	const char *name;
	enum doca_flow_pipe_type type;
	enum doca_flow_pipe_domain domain;
	bool is_root;
	uint32_t nb_flows;
	bool is_resizable;
	bool enable_strict_matching;
	uint8_t nb_actions;
	uint8_t nb_ordered_lists;
	int dir_info;
	bool miss_counter;
	uint8_t congestion_level_threshold;
	void *user_ctx;
};

struct doca_flow_pipe_cfg {
	struct doca_flow_pipe_attr attr;
	struct doca_flow_port *port;
	struct doca_flow_match *match;
	struct doca_flow_match *match_mask;
	struct doca_flow_actions **actions;
	struct doca_flow_actions **actions_masks;
	void **action_descs;
	struct doca_flow_monitor *monitor;
	void **ordered_lists;
};

doca_error_t doca_flow_init(const struct doca_flow_cfg *cfg);
#else
struct doca_flow_cfg;
struct doca_flow_port_cfg;
struct doca_flow_pipe_cfg;

doca_error_t doca_flow_cfg_create(struct doca_flow_cfg **cfg);
doca_error_t doca_flow_cfg_destroy(struct doca_flow_cfg *cfg);
doca_error_t doca_flow_cfg_set_pipe_queues(struct doca_flow_cfg *cfg, uint16_t queues);
doca_error_t doca_flow_cfg_set_nr_counters(struct doca_flow_cfg *cfg, uint32_t counters);
doca_error_t doca_flow_cfg_set_mode_args(struct doca_flow_cfg *cfg, const char *mode);
doca_error_t doca_flow_cfg_set_cb_entry_process(struct doca_flow_cfg *cfg, doca_flow_entry_process_cb cb);
#if SIMULATED < 302
doca_error_t doca_flow_cfg_set_nr_shared_resource(struct doca_flow_cfg *cfg, uint32_t count,
						  enum doca_flow_shared_resource_type type);
#endif
doca_error_t doca_flow_init(struct doca_flow_cfg *cfg);

doca_error_t doca_flow_port_cfg_create(struct doca_flow_port_cfg **cfg);
doca_error_t doca_flow_port_cfg_destroy(struct doca_flow_port_cfg *cfg);
doca_error_t doca_flow_port_cfg_set_devargs(struct doca_flow_port_cfg *cfg, const char *arguments);
#if SIMULATED >= 303
doca_error_t doca_flow_port_cfg_set_dev(struct doca_flow_port_cfg *cfg, struct doca_dev *dev);
#else
doca_error_t doca_flow_port_cfg_set_dev(struct doca_flow_port_cfg *cfg, void *dev);
#endif
#if SIMULATED >= 210
doca_error_t doca_flow_port_cfg_set_actions_mem_size(struct doca_flow_port_cfg *cfg, uint32_t bytes);
#endif
#if SIMULATED >= 300
doca_error_t doca_flow_port_cfg_set_port_id(struct doca_flow_port_cfg *cfg, uint16_t port);
#endif
#if SIMULATED >= 301
doca_error_t doca_flow_port_cfg_set_dev_rep(struct doca_flow_port_cfg *cfg, struct doca_dev_rep *rep);
#endif

doca_error_t doca_flow_pipe_cfg_create(struct doca_flow_pipe_cfg **cfg, struct doca_flow_port *port);
doca_error_t doca_flow_pipe_cfg_destroy(struct doca_flow_pipe_cfg *cfg);
doca_error_t doca_flow_pipe_cfg_set_name(struct doca_flow_pipe_cfg *cfg, const char *name);
doca_error_t doca_flow_pipe_cfg_set_type(struct doca_flow_pipe_cfg *cfg, enum doca_flow_pipe_type type);
doca_error_t doca_flow_pipe_cfg_set_domain(struct doca_flow_pipe_cfg *cfg, enum doca_flow_pipe_domain domain);
doca_error_t doca_flow_pipe_cfg_set_is_root(struct doca_flow_pipe_cfg *cfg, bool root);
doca_error_t doca_flow_pipe_cfg_set_nr_entries(struct doca_flow_pipe_cfg *cfg, uint32_t entries);
doca_error_t doca_flow_pipe_cfg_set_match(struct doca_flow_pipe_cfg *cfg, const struct doca_flow_match *match,
					  const struct doca_flow_match *mask);
doca_error_t doca_flow_pipe_cfg_set_monitor(struct doca_flow_pipe_cfg *cfg, const struct doca_flow_monitor *monitor);
#if SIMULATED >= 301
doca_error_t doca_flow_pipe_cfg_set_hash_map_algorithm(struct doca_flow_pipe_cfg *cfg, uint32_t algorithms);
#endif
#endif

/* -- functions --------------------------------------------------------------------------------- */

void doca_flow_destroy(void);
doca_error_t doca_flow_port_start(const struct doca_flow_port_cfg *cfg, struct doca_flow_port **port);
doca_error_t doca_flow_port_stop(struct doca_flow_port *port);
void doca_flow_port_pipes_flush(struct doca_flow_port *port);
struct doca_flow_port *doca_flow_port_switch_get(const struct doca_flow_port *port);
doca_error_t doca_flow_get_target(enum doca_flow_target_type type, struct doca_flow_target **target);

doca_error_t doca_flow_pipe_create(const struct doca_flow_pipe_cfg *cfg, const struct doca_flow_fwd *fwd,
				   const struct doca_flow_fwd *fwd_miss, struct doca_flow_pipe **pipe);
void doca_flow_pipe_destroy(struct doca_flow_pipe *pipe);
doca_error_t doca_flow_entries_process(struct doca_flow_port *port, uint16_t queue, uint64_t timeout_us,
				       uint32_t most);

#if SIMULATED >= 303
doca_error_t doca_flow_pipe_basic_add_entry(uint16_t queue, struct doca_flow_pipe *pipe,
					    const struct doca_flow_match *match, uint8_t action_idx,
					    const struct doca_flow_actions *actions,
					    const struct doca_flow_monitor *monitor, const struct doca_flow_fwd *fwd,
					    uint32_t flags, void *context, struct doca_flow_pipe_entry **entry);
#elif SIMULATED >= 302
doca_error_t doca_flow_pipe_add_entry(uint16_t queue, struct doca_flow_pipe *pipe, const struct doca_flow_match *match,
				      uint8_t action_idx, const struct doca_flow_actions *actions,
				      const struct doca_flow_monitor *monitor, const struct doca_flow_fwd *fwd,
				      uint32_t flags, void *context, struct doca_flow_pipe_entry **entry);
#else
doca_error_t doca_flow_pipe_add_entry(uint16_t queue, struct doca_flow_pipe *pipe, const struct doca_flow_match *match,
				      const struct doca_flow_actions *actions, const struct doca_flow_monitor *monitor,
				      const struct doca_flow_fwd *fwd, uint32_t flags, void *context,
				      struct doca_flow_pipe_entry **entry);
#endif

#if SIMULATED >= 302
doca_error_t doca_flow_pipe_hash_add_entry(uint16_t queue, struct doca_flow_pipe *pipe, uint32_t entry_index,
					   uint8_t action_idx, const struct doca_flow_actions *actions,
					   const struct doca_flow_monitor *monitor, const struct doca_flow_fwd *fwd,
					   uint32_t flags, void *context, struct doca_flow_pipe_entry **entry);
#else
doca_error_t doca_flow_pipe_hash_add_entry(uint16_t queue, struct doca_flow_pipe *pipe, uint32_t entry_index,
					   const struct doca_flow_actions *actions,
					   const struct doca_flow_monitor *monitor, const struct doca_flow_fwd *fwd,
					   enum doca_flow_flags_type flags, void *context,
					   struct doca_flow_pipe_entry **entry);
#endif

#if SIMULATED < 209
doca_error_t doca_flow_pipe_rm_entry(uint16_t queue, uint32_t flags, struct doca_flow_pipe_entry *entry);
#else
doca_error_t doca_flow_pipe_remove_entry(uint16_t queue, uint32_t flags, struct doca_flow_pipe_entry *entry);
#endif

#if SIMULATED < 209
doca_error_t doca_flow_query_entry(struct doca_flow_pipe_entry *entry, struct doca_flow_query *query);
#else
doca_error_t doca_flow_resource_query_entry(struct doca_flow_pipe_entry *entry, struct doca_flow_resource_query *query);
#endif

#if SIMULATED < 302
#if SIMULATED < 209
doca_error_t doca_flow_shared_resource_cfg(enum doca_flow_shared_resource_type type, uint32_t id,
					   struct doca_flow_shared_resource_cfg *cfg);
#else
doca_error_t doca_flow_shared_resource_set_cfg(enum doca_flow_shared_resource_type type, uint32_t id,
					       struct doca_flow_shared_resource_cfg *cfg);
#endif
doca_error_t doca_flow_shared_resources_bind(enum doca_flow_shared_resource_type type, uint32_t *ids, uint32_t count,
					     void *port_or_pipe);
#endif

#endif
