/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ring between the receiving thread and poll(), and the packets' stamps. A record never wraps: where it would,
 * an empty one fills the ring's end.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "adapter.h"

#define SECOND 1000000000ull
#define EMPTY UINT32_MAX /* for nanoseconds: any second may be a packet's, also that of a clock never set */

_Static_assert(sizeof(struct dpuflow_doca_record) == 80, "a head takes 80 bytes");
_Static_assert(offsetof(struct dpuflow_doca_record, data) == 24, "tpacket3_hdr.tp_mac");
_Static_assert(offsetof(struct dpuflow_doca_record, direction) == 58, "sockaddr_ll.sll_pkttype");
_Static_assert(sizeof(struct dpuflow_doca_block) == 48, "tpacket_block_desc");

int ring_open(struct ring *ring, uint64_t bytes)
{
	for (ring->size = 1 << 16; ring->size < bytes; ring->size *= 2)
		;
	ring->bytes = malloc(ring->size);
	if (!ring->bytes)
		return say(DPUFLOW_DOCA_MISSING, "no memory for a ring of %llu bytes: choose a smaller --buffer",
			   (unsigned long long)ring->size);
	return DPUFLOW_DOCA_OK;
}

void ring_close(struct ring *ring)
{
	free(ring->bytes);
	ring->bytes = NULL;
}

/* Room for a packet of `length` bytes, of which `captured` are to be filled in; NULL where the ring is full. */
uint8_t *ring_reserve(struct dpuflow_doca *session, uint32_t length, uint64_t stamp_ns, unsigned int lane,
		      uint32_t *captured)
{
	struct ring *ring = &session->ring;
	uint64_t written = atomic_load_explicit(&ring->written, memory_order_relaxed);
	uint64_t taken = atomic_load_explicit(&ring->taken, memory_order_acquire);
	struct dpuflow_doca_record *record;
	uint64_t size, to_end, skipped;

	*captured = length < session->options.snaplen ? length : session->options.snaplen;
	size = (sizeof(*record) + *captured + 15) & ~15ull;
	to_end = ring->size - (written & (ring->size - 1));
	skipped = size > to_end ? to_end : 0;
	if (size + skipped > ring->size - (written - taken)) {
		atomic_fetch_add_explicit(&session->ring_full, 1, memory_order_relaxed);
		return NULL;
	}
	if (skipped) {
		/* 16 bytes at least are left: sizes are multiples of 16. */
		record = (struct dpuflow_doca_record *)(ring->bytes + (written & (ring->size - 1)));
		record->next = skipped;
		record->nanoseconds = EMPTY;
	}
	record = (struct dpuflow_doca_record *)(ring->bytes + ((written + skipped) & (ring->size - 1)));
	memset(record, 0, sizeof(*record));
	record->next = size;
	record->seconds = stamp_ns / SECOND;
	record->nanoseconds = stamp_ns % SECOND;
	record->captured = *captured;
	record->length = length;
	record->data = sizeof(*record);
	record->direction = lane ? 4 : 0;
	ring->pending = skipped + size;
	return (uint8_t *)(record + 1);
}

void ring_submit(struct dpuflow_doca *session)
{
	atomic_fetch_add_explicit(&session->ring.written, session->ring.pending, memory_order_release);
}

/* As many records as there are and fit, behind a block's head. */
void ring_take(struct ring *ring, uint8_t *room, uint64_t bytes)
{
	struct dpuflow_doca_block *block = (struct dpuflow_doca_block *)room;
	uint64_t written = atomic_load_explicit(&ring->written, memory_order_acquire);
	uint64_t taken = atomic_load_explicit(&ring->taken, memory_order_relaxed);
	uint64_t filled = sizeof(*block);

	memset(block, 0, sizeof(*block));
	block->version = 1;
	block->first = sizeof(*block);
	block->waiting = written - taken;
	block->ring = ring->size;
	while (taken < written) {
		const uint8_t *at = ring->bytes + (taken & (ring->size - 1));
		uint32_t next, nanoseconds;

		memcpy(&next, at, sizeof(next));
		memcpy(&nanoseconds, at + offsetof(struct dpuflow_doca_record, nanoseconds), sizeof(nanoseconds));
		if (nanoseconds == EMPTY) {
			taken += next;
			continue;
		}
		if (filled + next > bytes)
			break;
		memcpy(room + filled, at, next);
		filled += next;
		taken += next;
		block->records++;
	}
	block->bytes = filled;
	block->status = block->records ? 1 : 0;
	atomic_store_explicit(&ring->taken, taken, memory_order_release);
}

uint64_t wall_clock(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return now.tv_sec * SECOND + now.tv_nsec;
}

/* The card's stamp where its clock is set to wall time (REAL_TIME_CLOCK_ENABLE), else that of the arrival. */
uint64_t best_stamp(struct dpuflow_doca *session, uint64_t hardware_ns, uint64_t arrival_ns)
{
	if (hardware_ns + SECOND < arrival_ns || hardware_ns > arrival_ns + SECOND)
		return arrival_ns;
	atomic_fetch_add_explicit(&session->hardware, 1, memory_order_relaxed);
	return hardware_ns;
}
