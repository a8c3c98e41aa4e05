/* SPDX-License-Identifier: Apache-2.0 */
/* A release's struct doca_flow_match to the fields that the card knows; what the card does not know is refused. */
#include <arpa/inet.h>
#include <string.h>

#include "sim.h"

/* `mask` NULL: a field that is set is matched whole, all ones stand for each entry's own value. */
static void field(struct card_match *read, uint32_t *own, enum card_field which, uint32_t value, uint32_t mask,
		  uint32_t ones, bool masked)
{
	if (!masked)
		mask = value ? ones : 0;
	read->mask[which] = mask;
	read->value[which] = value;
	if (own)
		own[which] = mask && value == ones;
}

static uint32_t swap(uint16_t value)
{
	return ntohs(value);
}

#if SIMULATED >= 303
static uint32_t qp(const uint8_t *at)
{
	return (uint32_t)at[0] << 16 | (uint32_t)at[1] << 8 | at[2];
}
#endif

doca_error_t read_match(const struct doca_flow_match *match, const struct doca_flow_match *mask,
			struct card_match *read, uint32_t own[FIELDS])
{
	static const struct doca_flow_match nothing;
	const struct doca_flow_match *under = mask ? mask : &nothing;
	struct doca_flow_match rest = *match;
	bool masked = mask != NULL;
	uint32_t type = match->outer.l4_type_ext;

	memset(read, 0, sizeof(*read));
#if SIMULATED >= 300
	field(read, own, FIELD_PORT, match->parser_meta.port_id, under->parser_meta.port_id, 0xffff, masked);
	field(read, own, FIELD_RANDOM, swap(match->parser_meta.random), swap(under->parser_meta.random), 0xffff,
	      masked);
	rest.parser_meta.port_id = 0;
#else
	field(read, own, FIELD_PORT, match->parser_meta.port_meta, under->parser_meta.port_meta, 0xffffffff, masked);
	field(read, own, FIELD_RANDOM, match->parser_meta.random, under->parser_meta.random, 0xffff, masked);
	rest.parser_meta.port_meta = 0;
#endif
	field(read, own, FIELD_L3, match->parser_meta.outer_l3_type, under->parser_meta.outer_l3_type, 0xffffffff,
	      masked);
	field(read, own, FIELD_L4, match->parser_meta.outer_l4_type, under->parser_meta.outer_l4_type, 0xffffffff,
	      masked);
	rest.parser_meta.random = 0;
	rest.parser_meta.outer_l3_type = DOCA_FLOW_L3_META_NONE;
	rest.parser_meta.outer_l4_type = DOCA_FLOW_L4_META_NONE;
	/* Types only choose what the union means; the parser's types are what is matched. */
	if (match->outer.l3_type == 0xffffffff || type == 0xffffffff)
		return sim_no(DOCA_ERROR_INVALID_VALUE, "types cannot be changeable");
	if (match->outer.l3_type && match->parser_meta.outer_l3_type != (enum doca_flow_l3_meta)match->outer.l3_type)
		return sim_no(DOCA_ERROR_INVALID_VALUE, "l3_type without the parser's type");
	rest.outer.l3_type = DOCA_FLOW_L3_TYPE_NONE;
	rest.outer.l4_type_ext = DOCA_FLOW_L4_TYPE_EXT_NONE;
	if (type == DOCA_FLOW_L4_TYPE_EXT_UDP) {
		field(read, own, FIELD_UDP_DESTINATION, swap(match->outer.udp.l4_port.dst_port),
		      swap(under->outer.udp.l4_port.dst_port), 0xffff, masked);
		rest.outer.udp.l4_port.dst_port = 0;
#if SIMULATED >= 303
	} else if (type == DOCA_FLOW_L4_TYPE_EXT_ROCE_V2) {
		field(read, own, FIELD_UDP_DESTINATION, swap(match->outer.roce_v2.udp.l4_port.dst_port),
		      swap(under->outer.roce_v2.udp.l4_port.dst_port), 0xffff, masked);
		field(read, own, FIELD_QP, qp(match->outer.roce_v2.bth.dest_qp), qp(under->outer.roce_v2.bth.dest_qp),
		      0xffffff, masked);
		field(read, own, FIELD_OPCODE, match->outer.roce_v2.bth.opcode, under->outer.roce_v2.bth.opcode, 0xff,
		      masked);
		memset(&rest.outer.roce_v2, 0, sizeof(rest.outer.roce_v2));
#endif
	} else if (type) {
		return sim_no(DOCA_ERROR_NOT_SUPPORTED, "this type is not simulated");
	}
	if (memcmp(&rest, &nothing, sizeof(rest)))
		return sim_no(DOCA_ERROR_NOT_SUPPORTED, "a field that is not simulated is set");
	return DOCA_SUCCESS;
}
