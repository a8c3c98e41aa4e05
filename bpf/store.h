/* SPDX-License-Identifier: GPL-2.0-only */
/* A packet's first bytes into the ring. */
#ifndef DPUFLOW_STORE_H
#define DPUFLOW_STORE_H

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

/* Eight bytes at a time: from a pointer of unknown alignment the compiler would copy single bytes, which takes
 * four times as long. The kernel allows such loads where the processor does (x86-64, arm64). */
static __always_inline void copy_words(void *to, const void *from, __u32 bytes)
{
#pragma unroll
	for (__u32 k = 0; k < 16; k++)
		if (k < bytes / 8)
			((__u64 *)to)[k] = ((const __u64 *)from)[k];
}

/* A packet that ends within a small size class: its first `first` bytes, and its last `last` ones, which overlap. */
static __always_inline int copy_short(void *to, void *data, void *data_end, __u64 bytes, __u32 first, __u32 last)
{
	__u64 at = bytes - last;

	if (bytes < first || data + first > data_end)
		return -1;
	asm volatile("" : "+r"(at)); /* lest the compiler drop what the verifier needs */
	if (at > first || data + at + last > data_end)
		return -1;
	copy_words(to, data, first);
	copy_words(to + at, data + at, last);
	return 0;
}

/* One size class: the kernel reserves constant sizes only. Small ones are filled, whatever is wanted of them: the
 * reader looks at `captured`. Returns from the caller. */
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
		if ((room) <= 128 && !packet->tag && data + (room) <= data_end) {                             \
			copy_words(record + 1, data, (room) <= 128 ? (room) : 0);                             \
			SUBMIT(record);                                                                        \
			count->captured++;                                                                     \
			return;                                                                                \
		}                                                                                             \
		if ((room) <= 128 && !packet->tag &&                                                          \
		    !copy_short(record + 1, data, data_end, bytes, (room) == 64 ? 56 : 64,                    \
				(room) == 64 ? 8 : 64)) {                                                     \
			SUBMIT(record);                                                                       \
			count->captured++;                                                                    \
			return;                                                                               \
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
	record->kind = DPUFLOW_RING_PACKET;
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

#endif
