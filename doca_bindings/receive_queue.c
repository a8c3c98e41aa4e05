/* SPDX-License-Identifier: Apache-2.0 */
/* Copies from DOCA's own queues, without DPDK, from 3.3: one queue for each lane, batches with the card's stamps. */
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

#if QUEUES_WITHOUT_DPDK

#include <doca_buf.h>
#include <doca_ctx.h>
#include <doca_eth_rxq.h>
#include <doca_eth_rxq_cpu_data_path.h>
#include <doca_mmap.h>
#include <doca_pe.h>

#define BURST 1024
#define RATE_MB 12500 /* a second, 100 Gbit/s: what the packet buffer is made for */
#define PACKET_US 20  /* of the receiving thread for a packet, at worst */
#define LARGEST_LRO 1 /* as 2^n: packets are not merged */

struct queue {
	struct dpuflow_doca *session;
	unsigned int lane;
	struct doca_eth_rxq *rxq;
	struct doca_ctx *context;
	struct doca_mmap *map;
	void *memory;
	bool started;
};

struct receive {
	struct doca_pe *engine;
	struct queue queue[LANES];
	unsigned int taken; /* in the present look */
	_Atomic uint64_t idle;	     /* looks that found nothing */
	uint64_t copied, idle_then; /* at the last count, and how many such looks there had been */
	uint64_t certain, missed;    /* copied so long ago that the queues have been empty since; lost of those */
};

static void batch(struct doca_eth_rxq_event_batch_managed_recv *event, uint16_t count, union doca_data data,
		  doca_error_t status, struct doca_buf **packets)
{
	struct queue *queue = data.ptr;
	struct dpuflow_doca *session = queue->session;
	const uint64_t *stamps = NULL;
	uint64_t now = wall_clock();

	(void)status;
	if (doca_eth_rxq_event_batch_managed_recv_get_timestamp_array(event, &stamps) != DOCA_SUCCESS)
		stamps = NULL;
	for (uint16_t k = 0; k < count; k++) {
		uint32_t captured;
		size_t length;
		uint8_t *to;
		void *from;

		if (doca_buf_get_data_len(packets[k], &length) != DOCA_SUCCESS ||
		    doca_buf_get_data(packets[k], &from) != DOCA_SUCCESS) {
			atomic_fetch_add_explicit(&session->broken, 1, memory_order_relaxed);
			continue;
		}
		to = ring_reserve(session, length, stamps ? best_stamp(session, stamps[k], now) : now, queue->lane,
				  &captured);
		if (!to)
			continue;
		memcpy(to, from, captured);
		ring_submit(session);
	}
	atomic_fetch_add_explicit(&session->received, count, memory_order_relaxed);
	session->receive->taken += count;
	doca_eth_rxq_event_batch_managed_recv_pkt_array_free(packets);
}

static void batch_failed(struct doca_eth_rxq_event_batch_managed_recv *event, uint16_t count, union doca_data data,
			 doca_error_t status, struct doca_buf **packets)
{
	struct queue *queue = data.ptr;

	(void)event;
	(void)status;
	(void)packets;
	atomic_fetch_add_explicit(&queue->session->broken, count, memory_order_relaxed);
	atomic_fetch_add_explicit(&queue->session->received, count, memory_order_relaxed);
}

static int map_memory(struct dpuflow_doca *session, struct queue *queue, uint32_t *bytes)
{
	doca_error_t error =
		doca_eth_rxq_estimate_packet_buf_size(DOCA_ETH_RXQ_TYPE_MANAGED_MEMPOOL, RATE_MB, PACKET_US,
						      session->options.frame, BURST, LARGEST_LRO, 0, 0, bytes);

	if (error != DOCA_SUCCESS)
		return failed(error, "DOCA does not tell how much memory a queue needs");
	queue->memory = malloc(*bytes);
	if (!queue->memory)
		return say(DPUFLOW_DOCA_MISSING, "no memory for a queue's packets (%u bytes)", *bytes);
	error = doca_mmap_create(&queue->map);
	if (error == DOCA_SUCCESS)
		error = doca_mmap_set_permissions(queue->map, DOCA_ACCESS_FLAG_LOCAL_READ_WRITE);
	if (error == DOCA_SUCCESS)
		error = doca_mmap_set_memrange(queue->map, queue->memory, *bytes);
	if (error == DOCA_SUCCESS)
		error = doca_mmap_set_max_num_devices(queue->map, 1);
	if (error == DOCA_SUCCESS)
		error = doca_mmap_add_dev(queue->map, session->device);
	if (error == DOCA_SUCCESS)
		error = doca_mmap_start(queue->map);
	if (error != DOCA_SUCCESS)
		return failed(error, "a queue's memory cannot be given to the card");
	return DPUFLOW_DOCA_OK;
}

static int open_queue(struct dpuflow_doca *session, struct queue *queue)
{
	union doca_data data = {.ptr = queue};
	doca_error_t error;
	uint32_t bytes;

	error = doca_eth_rxq_create(session->device, BURST, session->options.frame, &queue->rxq);
	if (error != DOCA_SUCCESS)
		return failed(error, "%s: no receive queue can be made", session->options.device);
	if (map_memory(session, queue, &bytes))
		return DPUFLOW_DOCA_FAILED;
	error = doca_eth_rxq_set_type(queue->rxq, DOCA_ETH_RXQ_TYPE_MANAGED_MEMPOOL);
	if (error == DOCA_SUCCESS)
		error = doca_eth_rxq_set_pkt_buf(queue->rxq, queue->map, 0, bytes);
	if (error == DOCA_SUCCESS)
		error = doca_eth_rxq_set_timestamp(queue->rxq, 1);
	if (error == DOCA_SUCCESS)
		error = doca_eth_rxq_event_batch_managed_recv_register(queue->rxq, DOCA_EVENT_BATCH_EVENTS_NUMBER_128,
								       DOCA_EVENT_BATCH_EVENTS_NUMBER_1, data, batch,
								       batch_failed);
	if (error != DOCA_SUCCESS)
		return failed(error, "a receive queue cannot be set up");
	queue->context = doca_eth_rxq_as_doca_ctx(queue->rxq);
	error = doca_pe_connect_ctx(session->receive->engine, queue->context);
	if (error == DOCA_SUCCESS)
		error = doca_ctx_start(queue->context);
	queue->started = error == DOCA_SUCCESS;
	/* The number that pipes name it by: ours to choose, once it is started. */
	if (error == DOCA_SUCCESS)
		error = doca_eth_rxq_apply_queue_id(queue->rxq, queue->lane);
	if (error != DOCA_SUCCESS)
		return failed(error, "a receive queue cannot be started");
	return DPUFLOW_DOCA_OK;
}

int receive_open(struct dpuflow_doca *session)
{
	struct receive *receive = calloc(1, sizeof(*receive));
	int status = DPUFLOW_DOCA_OK;
	doca_error_t error;

	/* Without DPDK the ports' numbers are ours to choose. */
	for (unsigned int place = 0; place < session->ports; place++)
		session->number[place] = place;
	if (!receive)
		return say(DPUFLOW_DOCA_MISSING, "no memory for the receiver");
	session->receive = receive;
	if (session->options.copy_to[0])
		return DPUFLOW_DOCA_OK;
	error = doca_pe_create(&receive->engine);
	if (error != DOCA_SUCCESS)
		return failed(error, "DOCA has no progress engine for the receive queues");
	for (unsigned int lane = 0; lane < LANES && !status; lane++) {
		receive->queue[lane].session = session;
		receive->queue[lane].lane = lane;
		status = open_queue(session, &receive->queue[lane]);
	}
	return status;
}

unsigned int receive_some(struct dpuflow_doca *session)
{
	session->receive->taken = 0;
	while (doca_pe_progress(session->receive->engine) && session->receive->taken < BURST)
		;
	if (!session->receive->taken)
		atomic_fetch_add(&session->receive->idle, 1);
	return session->receive->taken;
}

/*
 * No counter of the queue is known: what the card copied and nobody received. What was copied a moment ago is on
 * its way, so that a count is taken for certain only when a whole look has found the queues empty since then (the
 * first of two may have begun before), or when the receiving thread has ended, which empties them.
 */
int receive_missed(struct dpuflow_doca *session, uint64_t *packets)
{
	struct receive *receive = session->receive;
	uint64_t idle = atomic_load(&receive->idle), copied = 0, received;
	int status = DPUFLOW_DOCA_OK;

	for (unsigned int k = 0; k < LANES; k++)
		for (unsigned int choice = 0; choice < session->lane[k].choices; choice++)
			if (count_entry(session->lane[k].chosen[choice], &copied))
				status = DPUFLOW_DOCA_FAILED;
	if (!session->threaded) {
		receive->certain = copied;
	} else if (idle >= receive->idle_then + 2) {
		receive->certain = receive->copied;
		receive->copied = copied;
		receive->idle_then = atomic_load(&receive->idle);
	}
	received = atomic_load(&session->received);
	if (receive->certain > received + receive->missed)
		receive->missed = receive->certain - received;
	*packets = receive->missed;
	return status;
}

static void close_queue(struct queue *queue)
{
	doca_error_t error = DOCA_SUCCESS;

	if (queue->started)
		error = doca_ctx_stop(queue->context);
	if (error != DOCA_SUCCESS)
		failed(error, "a receive queue cannot be stopped");
	if (queue->rxq && (error = doca_eth_rxq_destroy(queue->rxq)) != DOCA_SUCCESS)
		failed(error, "a receive queue cannot be given back");
	if (queue->map && (error = doca_mmap_destroy(queue->map)) != DOCA_SUCCESS)
		failed(error, "a queue's memory cannot be taken back from the card");
	free(queue->memory);
}

int receive_close(struct dpuflow_doca *session)
{
	struct receive *receive = session->receive;

	if (!receive)
		return DPUFLOW_DOCA_OK;
	for (unsigned int lane = LANES; lane-- > 0;)
		close_queue(&receive->queue[lane]);
	if (receive->engine)
		doca_pe_destroy(receive->engine);
	free(receive);
	session->receive = NULL;
	return DPUFLOW_DOCA_OK;
}

#else
typedef int receive_queue_is_empty;
#endif
