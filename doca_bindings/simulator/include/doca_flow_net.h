/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Written for dpuflow's simulator: the headers that DOCA Flow matches, with the sizes and places of each release.
 * Of 3.3 and later the places inside of `outer` are not known; there a program must be compiled against the real ones.
 */
#ifndef SIMULATED_DOCA_FLOW_NET_H
#define SIMULATED_DOCA_FLOW_NET_H

#include <stdint.h>

#include <doca_version.h>

typedef uint16_t doca_be16_t;
typedef uint32_t doca_be32_t;

enum doca_flow_l3_type {
	DOCA_FLOW_L3_TYPE_NONE = 0,
	DOCA_FLOW_L3_TYPE_IP4,
	DOCA_FLOW_L3_TYPE_IP6,
};

enum doca_flow_l4_type_ext {
	DOCA_FLOW_L4_TYPE_EXT_NONE = 0,
	DOCA_FLOW_L4_TYPE_EXT_TCP,
	DOCA_FLOW_L4_TYPE_EXT_UDP,
	DOCA_FLOW_L4_TYPE_EXT_ICMP,
	DOCA_FLOW_L4_TYPE_EXT_ICMP6,
	DOCA_FLOW_L4_TYPE_EXT_TRANSPORT,
#if SIMULATED >= 303
	DOCA_FLOW_L4_TYPE_EXT_ROCE_V2,
#endif
};

struct doca_flow_header_eth {
	uint8_t src_mac[6];
	uint8_t dst_mac[6];
	doca_be16_t type;
};

struct doca_flow_header_eth_vlan {
	doca_be16_t tci;
};

struct doca_flow_header_ip4 {
	doca_be32_t src_ip;
	doca_be32_t dst_ip;
	uint8_t version_ihl;
	uint8_t dscp_ecn;
	uint16_t total_len;
#if SIMULATED >= 207
	uint16_t identification;
	uint16_t flags_fragment_offset;
#endif
	uint8_t next_proto;
	uint8_t ttl;
};

struct doca_flow_header_ip6 {
	doca_be32_t src_ip[4];
	doca_be32_t dst_ip[4];
#if SIMULATED >= 207
	uint8_t traffic_class;
	doca_be32_t flow_label;
#else
	uint8_t dscp_ecn;
#endif
	uint16_t payload_len;
	uint8_t next_proto;
	uint8_t hop_limit;
};

struct doca_flow_header_l4_port {
	doca_be16_t src_port;
	doca_be16_t dst_port;
};

struct doca_flow_header_udp {
	struct doca_flow_header_l4_port l4_port;
};

struct doca_flow_header_tcp {
	struct doca_flow_header_l4_port l4_port;
	uint8_t data_offset;
	uint8_t flags;
};

#if SIMULATED >= 303
#define DOCA_FLOW_ROCEV2_DEFAULT_PORT 4791
#define DOCA_FLOW_IB_BTH_DST_QP_LEN 3

struct doca_flow_header_ib_bth {
	uint8_t opcode;
	uint8_t flags1;
	uint8_t dest_qp[DOCA_FLOW_IB_BTH_DST_QP_LEN];
};

struct doca_flow_header_roce_v2 {
	struct doca_flow_header_udp udp;
	struct doca_flow_header_ib_bth bth;
};
#endif

/* Tunnels are not simulated; they take their place. */
#if SIMULATED >= 207
struct doca_flow_tun {
	uint64_t bytes[34];
};
#else
struct doca_flow_tun {
	uint32_t bytes[66];
};
#endif

#endif
