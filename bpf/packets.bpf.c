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
		describe(record, packet, found, bytes);                                                       \
		if ((room) <= 128 && bytes == (room) && !packet->tag && data + (room) <= data_end) {          \
			__builtin_memcpy(record + 1, data, (room) <= 128 ? (room) : 0);                       \
			SUBMIT(record);                                                                        \
			count->captured++;                                                                     \
			return;                                                                                \
		}                                                                                             \
		if (copy(ctx, xdp, packet, record, bytes)) {                                           \
			DISCARD(record);                                                                       \
			count->unreadable++;                                                                   \
		} else {                                                                                      \
			SUBMIT(record);                                                                        \
			count->captured++;                                                                     \
		}                                                                                             \
		return;                                                                                       \
	} while (0)

static __always_inline void describe(struct dpuflow_ring_packet *record, const struct packet *packet,
				     const struct found *found, __u64 bytes)
{
	record->time_ns = packet->time_ns + settings.clock_ns;
	record->wire_len = packet->wire_len;
	record->captured = bytes;
	record->flow_hash = found->flow_hash;
	record->iface = settings.iface;
	record->direction = packet->direction;
	record->ends = found->ends;
	record->reserved = 0;
}

/* The first bytes of the packet behind `record`, wherever they lie. */
static __always_inline long copy(void *ctx, int xdp, const struct packet *packet,
				 struct dpuflow_ring_packet *record, __u64 bytes)
{
	__u8 *to = (__u8 *)(record + 1);

	if (xdp || !packet->tag)
		return bytes < ETHERNET ? -1 : load(ctx, xdp, 0, to, bytes);
	if (bytes < ETHERNET + 4 || load(ctx, xdp, 0, to, 12))
		return -1;
	__builtin_memcpy(to + 12, &packet->tag, 4);
	return load(ctx, xdp, 12, to + 16, bytes - 16);
}

static __always_inline void store(void *ctx, int xdp, void *data, void *data_end, const struct packet *packet,
				  const struct found *found, struct dpuflow_counters *count)
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
		packet.time_ns = bpf_ktime_get_ns();
		packet.captured = packet.wire_len < settings.snaplen ? packet.wire_len : settings.snaplen;
		store(ctx, xdp, data, data_end, &packet, &found, count);
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
