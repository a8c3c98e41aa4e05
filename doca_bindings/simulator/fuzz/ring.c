/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A target as libFuzzer's: packets of any length and stamp into the ring, polls with any room. What comes out is what went
 * in, in order and whole, and no record is ever longer than the room was said to be.
 */
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

#define MOST 4096

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint64_t number(const uint8_t **at, const uint8_t *end, unsigned int bytes)
{
	uint64_t value = 0;

	while (bytes-- && *at < end)
		value = value << 8 | *(*at)++;
	return value;
}

static void look(struct ring *ring, uint64_t bytes, uint32_t *expected)
{
	uint8_t *room = malloc(bytes);
	const struct dpuflow_doca_block *block = (const void *)room;
	uint64_t at;

	ring_take(ring, room, bytes);
	if (block->bytes > bytes)
		abort();
	at = block->first;
	for (uint32_t k = 0; k < block->records; k++) {
		const struct dpuflow_doca_record *record = (const void *)(room + at);

		if (at + sizeof(*record) + record->captured > block->bytes || record->next & 15)
			abort();
		if (record->captured >= 4 && memcmp(record + 1, expected, 4))
			abort();
		*expected += record->captured >= 4;
		at += record->next;
	}
	if (at != block->bytes)
		abort();
	free(room);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const uint8_t *end = data + size;
	static struct dpuflow_doca session;
	uint32_t written = 0, read = 0, captured;

	memset(&session, 0, sizeof(session));
	session.options.snaplen = number(&data, end, 2) % MOST;
	if (ring_open(&session.ring, number(&data, end, 2)))
		return 0;
	while (data < end) {
		uint8_t what = number(&data, end, 1);

		if (what & 1) {
			look(&session.ring, sizeof(struct dpuflow_doca_block) + number(&data, end, 2), &read);
			continue;
		}
		uint32_t length = number(&data, end, 2); /* one after the other, whatever the compiler */
		uint64_t stamp_ns = (1 + number(&data, end, 5)) * 1000000000ull;
		uint8_t *to = ring_reserve(&session, length, stamp_ns, what >> 1 & 1, &captured);

		if (!to)
			continue;
		memset(to, 0, captured);
		if (captured >= 4) {
			memcpy(to, &written, 4);
			written++;
		}
		ring_submit(&session);
	}
	ring_close(&session.ring);
	return 0;
}
