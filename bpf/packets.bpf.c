// SPDX-License-Identifier: GPL-2.0-only
/* Every wanted packet's first bytes into the ring, stamped and counted. Nothing is ever dropped or changed:
 * XDP programs pass, tc programs leave the word to the next one. */
#include "parse.h"

struct packet {
	__u64 time_ns;
	__u64 captured;
	__u32 wire_len;
	__u32 tag; /* VLAN tag that the kernel took out of the bytes, as on the wire; 0: none */
	__u8 direction;
};

static __always_inline long load(void *ctx, int xdp, __u32 from, void *to, __u32 bytes)
{
	return xdp ? bpf_xdp_load_bytes(ctx, from, to, bytes) : bpf_skb_load_bytes(ctx, from, to, bytes);
}

/* One size class: the kernel reserves constant sizes only. Returns from the caller. */
#define STORE(room)                                                                                            \
	do {                                                                                                   \
		struct dpuflow_ring_packet *record = RESERVE(sizeof(*record) + (room));                       \
		__u64 bytes = packet->captured;                                                               \
		if (!record) {                                                                                \
			count->ring_full++;                                                                    \
			return;                                                                                \
		}                                                                                             \
		asm volatile("" : "+r"(bytes)); /* as below */                                                \
		if (bytes > (room))                                                                           \
			bytes = (room);                                                                        \
		if (fill(ctx, xdp, packet, found, record, bytes)) {                                           \
			DISCARD(record);                                                                       \
			count->unreadable++;                                                                   \
		} else {                                                                                      \
			SUBMIT(record);                                                                        \
			count->captured++;                                                                     \
		}                                                                                             \
		return;                                                                                       \
	} while (0)

static __always_inline long fill(void *ctx, int xdp, const struct packet *packet, const struct found *found,
				 struct dpuflow_ring_packet *record, __u64 bytes)
{
	__u8 *data = (__u8 *)(record + 1);

	record->time_ns = packet->time_ns + settings.clock_ns;
	record->wire_len = packet->wire_len;
	record->captured = bytes;
	record->flow_hash = found->flow_hash;
	record->iface = settings.iface;
	record->direction = packet->direction;
	record->ends = found->ends;
	record->reserved = 0;
	if (xdp || !packet->tag)
		return bytes < ETHERNET ? -1 : load(ctx, xdp, 0, data, bytes);
	if (bytes < ETHERNET + 4 || load(ctx, xdp, 0, data, 12))
		return -1;
	__builtin_memcpy(data + 12, &packet->tag, 4);
	return load(ctx, xdp, 12, data + 16, bytes - 16);
}

static __always_inline void store(void *ctx, int xdp, const struct packet *packet, const struct found *found,
				  struct dpuflow_counters *count)
{
	if (packet->captured <= DPUFLOW_CLASS_0)
		STORE(DPUFLOW_CLASS_0);
	if (settings.snaplen <= DPUFLOW_CLASS_1 || packet->captured <= DPUFLOW_CLASS_1)
		STORE(DPUFLOW_CLASS_1);
	if (settings.snaplen <= DPUFLOW_CLASS_2 || packet->captured <= DPUFLOW_CLASS_2)
		STORE(DPUFLOW_CLASS_2);
	if (settings.snaplen <= DPUFLOW_CLASS_3 || packet->captured <= DPUFLOW_CLASS_3)
		STORE(DPUFLOW_CLASS_3);
	if (settings.snaplen <= DPUFLOW_CLASS_4 || packet->captured <= DPUFLOW_CLASS_4)
		STORE(DPUFLOW_CLASS_4);
	if (settings.snaplen <= DPUFLOW_CLASS_5 || packet->captured <= DPUFLOW_CLASS_5)
		STORE(DPUFLOW_CLASS_5);
	if (settings.snaplen <= DPUFLOW_CLASS_6 || packet->captured <= DPUFLOW_CLASS_6)
		STORE(DPUFLOW_CLASS_6);
	STORE(DPUFLOW_CLASS_7);
}

/* `len`: bytes that ctx holds. */
static __always_inline void capture(void *ctx, int xdp, __u32 len, __u32 tag, __u8 direction)
{
	struct packet packet = { .wire_len = tag ? len + 4 : len, .tag = tag, .direction = direction };
	struct dpuflow_counters *count;
	struct found found = {};
	struct head head = {};
	__u64 bytes = len < HEAD ? len : HEAD;
	__u32 zero = 0;

	packet.time_ns = bpf_ktime_get_ns();
	count = COUNTERS(zero);
	if (!count)
		return;
	count->seen++;
	asm volatile("" : "+r"(bytes)); /* lest the compiler drop what the verifier needs */
	bytes &= sizeof(head) - 1;
	if (bytes < ETHERNET) {
		count->cut++;
		return;
	}
	if (load(ctx, xdp, 0, &head, bytes)) {
		count->unreadable++;
		return;
	}
	switch (judge(&head, len, tag ? TAGGED | be16((__u8 *)&tag + 2) : 0, &found)) {
	case WANTED:
		break;
	case NOT_WANTED:
		count->not_wanted++;
		return;
	case SAMPLED_OUT:
		count->sampled_out++;
		return;
	case FRAGMENT:
		count->fragment++;
		return;
	case CUT:
		count->cut++;
		return;
	}
	packet.captured = packet.wire_len < settings.snaplen ? packet.wire_len : settings.snaplen;
	store(ctx, xdp, &packet, &found, count);
}

static __always_inline int from_skb(struct __sk_buff *skb, __u8 direction)
{
	__u32 tag = 0;

	if (skb->vlan_present)
		tag = (skb->vlan_proto & 0xffff) | (__u32)__builtin_bswap16(skb->vlan_tci) << 16;
	capture(skb, 0, skb->len, tag, direction);
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
	capture(xdp, 1, bpf_xdp_get_buff_len(xdp), 0, DPUFLOW_DIRECTION_INBOUND);
	return XDP_PASS;
}
