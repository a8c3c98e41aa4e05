/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What packets are matched by. In a pipe's match all ones mean that each entry brings its own value, zero that the
 * field does not matter, and anything else that value; types choose only, and go with the parser's own types.
 */
#include <arpa/inet.h>
#include <string.h>

#include "adapter.h"

#define ROCE_PORT 4791

void match_port(struct doca_flow_match *match, uint32_t port)
{
#if PORT_MATCH_IS_ID
	match->parser_meta.port_id = port;
#else
	match->parser_meta.port_meta = port;
#endif
}

/* One of 2^bits packets: some of the bits that the card draws are 0. */
void match_random(struct doca_flow_match *match, struct doca_flow_match *mask, unsigned int bits)
{
	uint16_t drawn = (1u << bits) - 1;

	match->parser_meta.random = 0;
#if RANDOM_IS_BIG_ENDIAN
	drawn = htons(drawn);
#endif
	mask->parser_meta.random = drawn;
}

void match_ip(struct doca_flow_match *match, bool six)
{
	match->parser_meta.outer_l3_type = six ? DOCA_FLOW_L3_META_IPV6 : DOCA_FLOW_L3_META_IPV4;
}

void match_roce(struct doca_flow_match *match, bool six, const struct dpuflow_doca_options *options)
{
	match_ip(match, six);
	match->parser_meta.outer_l4_type = DOCA_FLOW_L4_META_UDP;
	match->outer.l3_type = six ? DOCA_FLOW_L3_TYPE_IP6 : DOCA_FLOW_L3_TYPE_IP4;
#if HAS_BTH
	if (options->qps || options->opcodes) {
		match->outer.l4_type_ext = DOCA_FLOW_L4_TYPE_EXT_ROCE_V2;
		match->outer.roce_v2.udp.l4_port.dst_port = htons(ROCE_PORT);
		if (options->qps)
			memset(match->outer.roce_v2.bth.dest_qp, 0xff, sizeof(match->outer.roce_v2.bth.dest_qp));
		if (options->opcodes)
			match->outer.roce_v2.bth.opcode = 0xff;
		return;
	}
#else
	(void)options;
#endif
	match->outer.l4_type_ext = DOCA_FLOW_L4_TYPE_EXT_UDP;
	/* A value, not a mask that entries fill: that gave an invalid item on 2.x. */
	match->outer.udp.l4_port.dst_port = htons(ROCE_PORT);
}

void match_roce_entry(struct doca_flow_match *match, const uint32_t *qp, const uint8_t *opcode)
{
#if HAS_BTH
	if (qp) {
		match->outer.roce_v2.bth.dest_qp[0] = *qp >> 16;
		match->outer.roce_v2.bth.dest_qp[1] = *qp >> 8;
		match->outer.roce_v2.bth.dest_qp[2] = *qp;
	}
	if (opcode)
		match->outer.roce_v2.bth.opcode = *opcode;
#else
	(void)match;
	(void)qp;
	(void)opcode;
#endif
}

void match_tcp(struct doca_flow_match *match, bool six)
{
	match_ip(match, six);
	match->parser_meta.outer_l4_type = DOCA_FLOW_L4_META_TCP;
}
