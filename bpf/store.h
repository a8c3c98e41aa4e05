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

/* The first bytes of the packet behind `record`, at most `room`, wherever they lie. */
static __always_inline long copy(void *ctx, int xdp, const struct packet *packet,
				 struct dpuflow_ring_packet *record, __u64 bytes, __u64 room)
{
	__u8 *to = (__u8 *)(record + 1);

	/* Lest the compiler drop or join what the verifier needs: that of Linux 6.1 knows the bounds of a value, not
	 * those of its copies or of what it was made from. */
	asm volatile("" : "+r"(bytes));
	if (bytes > room)
		return -1;
	asm volatile("" : "+r"(bytes));
	if (bytes < ETHERNET)
		return -1;
	if (xdp || !packet->tag)
		return load(ctx, xdp, 0, to, bytes);
	if (bytes < ETHERNET + 4 || load(ctx, xdp, 0, to, 12))
		return -1;
	__builtin_memcpy(to + 12, &packet->tag, 4);
	return load(ctx, xdp, 12, to + 16, bytes - 16);
}

/* A small record's bytes: `room` of them where the packet has as many, which is quickest, else `bytes`. What is
 * beyond `bytes` is not looked at. */
static __always_inline long copy_small(void *ctx, int xdp, void *data, void *data_end, const struct packet *packet,
				       struct dpuflow_ring_packet *record, __u64 bytes, __u32 room)
{
	if (!packet->tag && data + room <= data_end) {
		copy_words(record + 1, data, room);
		return 0;
	}
	if (!packet->tag &&
	    !copy_short(record + 1, data, data_end, bytes, room == 64 ? 56 : 64, room == 64 ? 8 : 64))
		return 0;
	return copy(ctx, xdp, packet, record, bytes, room);
}

/* A CPU's own ring, which nobody else writes: neither lock nor list of records that are being written. Programs
 * on a CPU do not interrupt each other, as softirqs are off; where they could be (real-time kernels) user space
 * sets no such rings. */
struct cell {
	__u64 head, unused_1[7];
	__u64 tail, unused_2[7];
	__u8 data[];
};

/* This CPU's own ring, if it has room for one more record. */
static __always_inline struct cell *roomy_cell(void)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct cell *cell;

	if (!settings.cell_mask)
		return 0;
	cell = CELL(cpu);
	if (!cell || cell->head - *(volatile __u64 *)&cell->tail > settings.cell_mask - DPUFLOW_CELL_RECORD)
		return 0;
	return cell;
}

static __always_inline void *place(struct cell *cell)
{
	return cell->data + (cell->head & settings.cell_mask);
}

/* The record of `bytes` that has been written there is the reader's from now on. */
static __always_inline void publish(struct cell *cell, __u64 bytes)
{
	bytes = bytes + 7 & ~7ULL;
	if (settings.ordered) {
		asm volatile("" ::: "memory");
		*(volatile __u64 *)&cell->head = cell->head + bytes;
	} else { /* with its result used: the kind of addition that orders what comes before it */
		__u64 before = __sync_fetch_and_add(&cell->head, bytes);
		asm volatile("" ::"r"(before));
	}
}

/* A packet into this CPU's own ring; 0 where it is too long for one, or there is no room. */
static __always_inline int store_own(void *ctx, int xdp, void *data, void *data_end, const struct packet *packet,
				     const struct found *found, struct dpuflow_counters *count)
{
	struct dpuflow_ring_packet *record;
	__u64 bytes = packet->captured;
	struct cell *cell;
	long failed;

	if (bytes > DPUFLOW_CLASS_1)
		return 0;
	cell = roomy_cell();
	if (!cell)
		return 0;
	asm volatile("" : "+r"(bytes)); /* lest the compiler drop what the verifier needs */
	if (bytes > DPUFLOW_CLASS_1)
		bytes = DPUFLOW_CLASS_1;
	record = place(cell);
	describe(record, packet, found, bytes);
	if (bytes <= DPUFLOW_CLASS_0)
		failed = copy_small(ctx, xdp, data, data_end, packet, record, bytes, DPUFLOW_CLASS_0);
	else
		failed = copy_small(ctx, xdp, data, data_end, packet, record, bytes, DPUFLOW_CLASS_1);
	if (failed) {
		count->unreadable++;
		return 1;
	}
	publish(cell, sizeof(*record) + bytes);
	count->captured++;
	return 1;
}

/* One size class of the kernel's ring buffer, which reserves constant sizes only. Returns from the caller. */
#define STORE(room)                                                                                            \
	do {                                                                                                   \
		struct dpuflow_ring_packet *record = RESERVE(sizeof(*record) + (room));                       \
		__u64 bytes = packet->captured;                                                               \
		if (!record) {                                                                                \
			count->ring_full++;                                                                    \
			return;                                                                                \
		}                                                                                             \
		asm volatile("" : "+r"(bytes)); /* as above */                                                \
		if (bytes > (room))                                                                           \
			bytes = (room);                                                                        \
		describe(record, packet, found, bytes);                                                       \
		if ((room) <= DPUFLOW_CLASS_1 ?                                                               \
			    copy_small(ctx, xdp, data, data_end, packet, record, bytes,                       \
				       (room) <= DPUFLOW_CLASS_1 ? (room) : DPUFLOW_CLASS_1) :                \
			    copy(ctx, xdp, packet, record, bytes, room)) {                                          \
			DISCARD(record);                                                                       \
			count->unreadable++;                                                                   \
		} else {                                                                                      \
			SUBMIT(record);                                                                        \
			count->captured++;                                                                     \
		}                                                                                             \
		return;                                                                                       \
	} while (0)

static __always_inline void store(void *ctx, int xdp, void *data, void *data_end, const struct packet *packet,
				  const struct found *found, struct dpuflow_counters *count)
{
	if (store_own(ctx, xdp, data, data_end, packet, found, count))
		return;
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
