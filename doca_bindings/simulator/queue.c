/* SPDX-License-Identifier: Apache-2.0 */
/* doca_eth_rxq with its memory and progress engine: receiving without DPDK, from 3.3. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#if SIMULATED >= 303

#include <doca_buf.h>
#include <doca_ctx.h>
#include <doca_eth_rxq.h>
#include <doca_eth_rxq_cpu_data_path.h>
#include <doca_mmap.h>
#include <doca_pe.h>

#define NO(error, why) return sim_no(error, why)
#define BATCH 128

struct doca_mmap {
	void *memory;
	size_t bytes;
	struct doca_dev *device;
	uint32_t permissions;
	bool started;
	unsigned int users;
};

struct doca_ctx {
	struct doca_eth_rxq *rxq;
	bool started;
	struct doca_pe *engine;
};

struct doca_eth_rxq {
	struct doca_ctx context;
	struct doca_dev *device;
	enum doca_eth_rxq_type type;
	struct doca_mmap *map;
	uint32_t bytes, burst, packet;
	bool stamps;
	int queue;
	union doca_data data;
	doca_eth_rxq_event_batch_managed_recv_handler_cb_t done;
};

struct doca_pe {
	struct doca_eth_rxq *rxq[CARD_QUEUES];
	unsigned int count;
};

struct doca_buf {
	void *data;
	size_t length;
};

struct doca_eth_rxq_event_batch_managed_recv {
	const uint64_t *stamps;
};

static struct doca_eth_rxq *applied[CARD_QUEUES];

bool ethdev_started(unsigned int number)
{
	(void)number;
	return true;
}

enum card_port ethdev_port(unsigned int number)
{
	return number;
}

bool queue_there(unsigned int number)
{
	return number < CARD_QUEUES && applied[number];
}

/* -- memory ------------------------------------------------------------------------------------ */

doca_error_t doca_mmap_create(struct doca_mmap **map)
{
	CALL();
	*map = calloc(1, sizeof(**map));
	sim_made(KIND_MAP);
	return DOCA_SUCCESS;
}

doca_error_t doca_mmap_destroy(struct doca_mmap *map)
{
	bool first = sim_call(__func__);

	if (map->users)
		NO(DOCA_ERROR_IN_USE, "memory is taken back while a queue uses it");
	if (map->device)
		map->device->users--;
	free(map);
	sim_gone(KIND_MAP);
	return first ? DOCA_ERROR_DRIVER : DOCA_SUCCESS;
}

doca_error_t doca_mmap_set_permissions(struct doca_mmap *map, uint32_t access)
{
	CALL();
	map->permissions = access;
	return DOCA_SUCCESS;
}

doca_error_t doca_mmap_set_memrange(struct doca_mmap *map, void *memory, size_t bytes)
{
	CALL();
	map->memory = memory;
	map->bytes = bytes;
	return DOCA_SUCCESS;
}

doca_error_t doca_mmap_set_max_num_devices(struct doca_mmap *map, uint32_t count)
{
	(void)map;
	CALL();
	return count ? DOCA_SUCCESS : DOCA_ERROR_INVALID_VALUE;
}

doca_error_t doca_mmap_add_dev(struct doca_mmap *map, struct doca_dev *dev)
{
	CALL();
	map->device = dev;
	dev->users++;
	return DOCA_SUCCESS;
}

doca_error_t doca_mmap_start(struct doca_mmap *map)
{
	CALL();
	if (!map->memory || !map->device || map->permissions != DOCA_ACCESS_FLAG_LOCAL_READ_WRITE)
		NO(DOCA_ERROR_BAD_STATE, "memory, a device and the right to write are needed first");
	map->started = true;
	return DOCA_SUCCESS;
}

/* -- queues ------------------------------------------------------------------------------------ */

doca_error_t doca_eth_rxq_estimate_packet_buf_size(enum doca_eth_rxq_type type, uint32_t rate, uint32_t packet_us,
						   uint32_t packet, uint32_t burst, uint8_t lro, uint16_t headroom,
						   uint16_t tailroom, uint32_t *bytes)
{
	(void)rate;
	(void)packet_us;
	(void)lro;
	CALL();
	if (type == DOCA_ETH_RXQ_TYPE_REGULAR)
		NO(DOCA_ERROR_NOT_SUPPORTED, "regular queues have no buffer of their own");
	*bytes = burst * (packet + headroom + tailroom);
	return DOCA_SUCCESS;
}

doca_error_t doca_eth_rxq_create(struct doca_dev *dev, uint32_t burst, uint32_t packet, struct doca_eth_rxq **rxq)
{
	CALL();
	*rxq = calloc(1, sizeof(**rxq));
	(*rxq)->context.rxq = *rxq;
	(*rxq)->device = dev;
	(*rxq)->type = DOCA_ETH_RXQ_TYPE_REGULAR;
	(*rxq)->burst = burst;
	(*rxq)->packet = packet;
	(*rxq)->queue = -1;
	dev->users++;
	sim_made(KIND_RXQ);
	return DOCA_SUCCESS;
}

doca_error_t doca_eth_rxq_destroy(struct doca_eth_rxq *rxq)
{
	bool first = sim_call(__func__);

	if (rxq->context.started)
		NO(DOCA_ERROR_BAD_STATE, "a queue is given back that runs");
	for (unsigned int k = 0; rxq->context.engine && k < rxq->context.engine->count; k++)
		if (rxq->context.engine->rxq[k] == rxq)
			rxq->context.engine->rxq[k] = NULL;
	rxq->device->users--;
	if (rxq->map)
		rxq->map->users--;
	free(rxq);
	sim_gone(KIND_RXQ);
	return first ? DOCA_ERROR_DRIVER : DOCA_SUCCESS;
}

doca_error_t doca_eth_rxq_set_type(struct doca_eth_rxq *rxq, enum doca_eth_rxq_type type)
{
	CALL();
	rxq->type = type;
	return DOCA_SUCCESS;
}

doca_error_t doca_eth_rxq_set_pkt_buf(struct doca_eth_rxq *rxq, struct doca_mmap *map, uint32_t offset,
				      uint32_t bytes)
{
	CALL();
	if (!map->started || offset + (size_t)bytes > map->bytes)
		NO(DOCA_ERROR_INVALID_VALUE, "the memory is not started, or too small");
	rxq->map = map;
	rxq->bytes = bytes;
	map->users++;
	return DOCA_SUCCESS;
}

doca_error_t doca_eth_rxq_set_timestamp(struct doca_eth_rxq *rxq, uint8_t enable)
{
	CALL();
	rxq->stamps = enable;
	return DOCA_SUCCESS;
}

doca_error_t doca_eth_rxq_event_batch_managed_recv_register(struct doca_eth_rxq *rxq,
							    enum doca_event_batch_events_number most,
							    enum doca_event_batch_events_number least,
							    union doca_data data,
							    doca_eth_rxq_event_batch_managed_recv_handler_cb_t done,
							    doca_eth_rxq_event_batch_managed_recv_handler_cb_t failed)
{
	CALL();
	if (most < least || !done || !failed)
		NO(DOCA_ERROR_INVALID_VALUE, "both callbacks are needed");
	rxq->data = data;
	rxq->done = done;
	return DOCA_SUCCESS;
}

struct doca_ctx *doca_eth_rxq_as_doca_ctx(struct doca_eth_rxq *rxq)
{
	return &rxq->context;
}

doca_error_t doca_eth_rxq_apply_queue_id(struct doca_eth_rxq *rxq, uint16_t queue)
{
	CALL();
	if (!rxq->context.started || queue >= CARD_QUEUES || applied[queue])
		NO(DOCA_ERROR_BAD_STATE, "the queue is not started, or that number taken");
	applied[queue] = rxq;
	rxq->queue = queue;
	return DOCA_SUCCESS;
}

doca_error_t doca_ctx_start(struct doca_ctx *context)
{
	const struct doca_eth_rxq *rxq = context->rxq;

	CALL();
	if (!context->engine || !rxq->map || !rxq->done || rxq->type != DOCA_ETH_RXQ_TYPE_MANAGED_MEMPOOL)
		NO(DOCA_ERROR_BAD_STATE, "type, memory, event and engine are needed first");
	context->started = true;
	sim_made(KIND_RUNNING);
	return DOCA_SUCCESS;
}

doca_error_t doca_ctx_stop(struct doca_ctx *context)
{
	bool first = sim_call(__func__);

	if (!context->started)
		NO(DOCA_ERROR_BAD_STATE, "it does not run");
	context->started = false;
	if (context->rxq->queue >= 0)
		applied[context->rxq->queue] = NULL;
	sim_gone(KIND_RUNNING);
	return first ? DOCA_ERROR_DRIVER : DOCA_SUCCESS;
}

/* -- progress ---------------------------------------------------------------------------------- */

doca_error_t doca_pe_create(struct doca_pe **engine)
{
	CALL();
	*engine = calloc(1, sizeof(**engine));
	sim_made(KIND_ENGINE);
	return DOCA_SUCCESS;
}

doca_error_t doca_pe_destroy(struct doca_pe *engine)
{
	for (unsigned int k = 0; k < engine->count; k++)
		if (engine->rxq[k])
			NO(DOCA_ERROR_IN_USE, "queues are connected");
	free(engine);
	sim_gone(KIND_ENGINE);
	return DOCA_SUCCESS;
}

doca_error_t doca_pe_connect_ctx(struct doca_pe *engine, struct doca_ctx *context)
{
	CALL();
	if (context->started || engine->count == CARD_QUEUES)
		NO(DOCA_ERROR_BAD_STATE, "it is connected before it starts");
	engine->rxq[engine->count++] = context->rxq;
	context->engine = engine;
	return DOCA_SUCCESS;
}

static unsigned int deliver(struct doca_eth_rxq *rxq)
{
	struct card_queue *from = &sim.card->queue[rxq->queue];
	struct doca_buf **buffers;
	struct doca_eth_rxq_event_batch_managed_recv event = {0};
	uint64_t stamps[BATCH];
	unsigned int count = 0;

	card_lock(sim.card);
	if (from->taken == from->written) {
		card_unlock(sim.card);
		return 0;
	}
	buffers = calloc(BATCH + 1, sizeof(*buffers));
	while (count < BATCH && from->taken < from->written) {
		const struct card_slot *slot = &from->slot[from->taken++ % CARD_SLOTS];

		buffers[count] = malloc(sizeof(**buffers));
		buffers[count]->length = slot->length;
		buffers[count]->data = malloc(slot->length + 1);
		memcpy(buffers[count]->data, slot->bytes, slot->length);
		stamps[count++] = slot->stamp_ns;
	}
	card_unlock(sim.card);
	event.stamps = rxq->stamps ? stamps : NULL;
	rxq->done(&event, count, rxq->data, DOCA_SUCCESS, buffers);
	return count;
}

uint8_t doca_pe_progress(struct doca_pe *engine)
{
	unsigned int count = 0;

	for (unsigned int k = 0; k < engine->count; k++)
		if (engine->rxq[k] && engine->rxq[k]->context.started && engine->rxq[k]->queue >= 0)
			count += deliver(engine->rxq[k]);
	return count > 0;
}

doca_error_t
doca_eth_rxq_event_batch_managed_recv_get_timestamp_array(const struct doca_eth_rxq_event_batch_managed_recv *event,
							  const uint64_t **stamps)
{
	*stamps = event->stamps;
	return event->stamps ? DOCA_SUCCESS : DOCA_ERROR_NOT_PERMITTED;
}

void doca_eth_rxq_event_batch_managed_recv_pkt_array_free(struct doca_buf **packets)
{
	for (unsigned int k = 0; packets[k]; k++) {
		free(packets[k]->data);
		free(packets[k]);
	}
	free(packets);
}

doca_error_t doca_buf_get_data(const struct doca_buf *buffer, void **data)
{
	*data = buffer->data;
	return DOCA_SUCCESS;
}

doca_error_t doca_buf_get_data_len(const struct doca_buf *buffer, size_t *bytes)
{
	*bytes = buffer->length;
	return DOCA_SUCCESS;
}

#else
typedef int queue_is_empty;
#endif
