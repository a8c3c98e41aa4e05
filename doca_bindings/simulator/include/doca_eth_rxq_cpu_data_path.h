/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: the names, values and signatures of DOCA's documented interface that it has. */
#ifndef SIMULATED_DOCA_ETH_RXQ_CPU_DATA_PATH_H
#define SIMULATED_DOCA_ETH_RXQ_CPU_DATA_PATH_H

#include <stdint.h>

#include <doca_error.h>
#include <doca_types.h>

struct doca_buf;
struct doca_eth_rxq;
struct doca_eth_rxq_event_batch_managed_recv;

typedef void (*doca_eth_rxq_event_batch_managed_recv_handler_cb_t)(struct doca_eth_rxq_event_batch_managed_recv *event,
								   uint16_t count, union doca_data data,
								   doca_error_t status, struct doca_buf **packets);

doca_error_t doca_eth_rxq_event_batch_managed_recv_register(
	struct doca_eth_rxq *rxq, enum doca_event_batch_events_number most, enum doca_event_batch_events_number least,
	union doca_data data, doca_eth_rxq_event_batch_managed_recv_handler_cb_t done,
	doca_eth_rxq_event_batch_managed_recv_handler_cb_t failed);
doca_error_t doca_eth_rxq_event_batch_managed_recv_get_timestamp_array(
	const struct doca_eth_rxq_event_batch_managed_recv *event, const uint64_t **stamps);
void doca_eth_rxq_event_batch_managed_recv_pkt_array_free(struct doca_buf **packets);

#endif
