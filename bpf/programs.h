/* SPDX-License-Identifier: GPL-2.0-only */
/* The programs and the way of a packet through them, up to take(), which whoever includes this has defined.
 * Nothing is ever dropped or changed: XDP programs pass, tc programs leave the word to the next one. */
#ifndef DPUFLOW_PROGRAMS_H
#define DPUFLOW_PROGRAMS_H

#include "stamp.h"

/* The headers of whatever judge_usual() does not know, copied to the stack: they may lie in several pieces. */
static __always_inline enum verdict judge_copied(void *ctx, int xdp, __u32 len, __u32 tag, struct found *found)
{
	__u64 bytes = len < HEAD ? len : HEAD;
	struct head head = {};

	asm volatile("" : "+r"(bytes)); /* lest the compiler drop what the verifier needs */
	bytes &= sizeof(head) - 1;
	if (bytes < ETHERNET)
		return CUT;
	if (load(ctx, xdp, 0, &head, bytes))
		return UNUSUAL;
	return judge(&head, len, tag ? TAGGED | be16((__u8 *)&tag + 2) : 0, found);
}

/* `len`: bytes that ctx holds, of which those from data to data_end lie in one piece. */
static __always_inline void capture(void *ctx, int xdp, __u32 len, void *data, void *data_end, __u32 tag,
				    __u8 direction)
{
	struct packet packet = { .wire_len = tag ? len + 4 : len, .tag = tag, .direction = direction };
	enum verdict verdict = UNUSUAL;
	struct dpuflow_counters *count;
	struct found found = {};
	__u32 zero = 0;

	count = COUNTERS(zero);
	if (!count)
		return;
	if (data + USUAL <= data_end)
		verdict = judge_usual(data, &found);
	if (verdict == UNUSUAL)
		verdict = judge_copied(ctx, xdp, len, tag, &found);
	if (verdict == WANTED) {
		packet.time_ns = stamp(ctx, xdp, direction, count);
		packet.captured = packet.wire_len < settings.snaplen ? packet.wire_len : settings.snaplen;
		take(ctx, xdp, data, data_end, &packet, &found, count);
	} else if (verdict == NOT_WANTED) {
		count->not_wanted++;
	} else if (verdict == SAMPLED_OUT) {
		count->sampled_out++;
	} else if (verdict == FRAGMENT) {
		count->fragment++;
	} else if (verdict == CUT) {
		count->cut++;
	} else {
		count->unreadable++;
	}
}

static __always_inline int from_skb(struct __sk_buff *skb, __u8 direction)
{
	__u32 tag = 0;

	if (skb->vlan_present)
		tag = (skb->vlan_proto & 0xffff) | (__u32)__builtin_bswap16(skb->vlan_tci) << 16;
	capture(skb, 0, skb->len, (void *)(long)skb->data, (void *)(long)skb->data_end, tag, direction);
	return -1; /* TCX_NEXT and TC_ACT_UNSPEC: as if we were not there */
}

SECTION("tc")
int dpuflow_in(struct __sk_buff *skb)
{
	return from_skb(skb, DPUFLOW_DIRECTION_INBOUND);
}

SECTION("tc")
int dpuflow_out(struct __sk_buff *skb)
{
	return from_skb(skb, DPUFLOW_DIRECTION_OUTBOUND);
}

SECTION("xdp.frags")
int dpuflow_xdp(struct xdp_md *xdp)
{
	capture(xdp, 1, bpf_xdp_get_buff_len(xdp), (void *)(long)xdp->data, (void *)(long)xdp->data_end, 0,
		DPUFLOW_DIRECTION_INBOUND);
	return XDP_PASS;
}

#endif
