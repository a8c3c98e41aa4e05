/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: the names, values and signatures of DOCA's documented interface that it has. */
#ifndef SIMULATED_DOCA_ETH_RXQ_H
#define SIMULATED_DOCA_ETH_RXQ_H

#include <stdint.h>

#include <doca_error.h>

struct doca_ctx;
struct doca_dev;
struct doca_eth_rxq;
struct doca_mmap;

enum doca_eth_rxq_type {
	DOCA_ETH_RXQ_TYPE_CYCLIC = 0,
	DOCA_ETH_RXQ_TYPE_MANAGED_MEMPOOL,
	DOCA_ETH_RXQ_TYPE_REGULAR,
};

doca_error_t doca_eth_rxq_create(struct doca_dev *dev, uint32_t burst, uint32_t packet, struct doca_eth_rxq **rxq);
doca_error_t doca_eth_rxq_destroy(struct doca_eth_rxq *rxq);
doca_error_t doca_eth_rxq_set_type(struct doca_eth_rxq *rxq, enum doca_eth_rxq_type type);
doca_error_t doca_eth_rxq_set_pkt_buf(struct doca_eth_rxq *rxq, struct doca_mmap *map, uint32_t offset, uint32_t bytes);
doca_error_t doca_eth_rxq_set_timestamp(struct doca_eth_rxq *rxq, uint8_t enable);
doca_error_t doca_eth_rxq_apply_queue_id(struct doca_eth_rxq *rxq, uint16_t queue);
doca_error_t doca_eth_rxq_estimate_packet_buf_size(enum doca_eth_rxq_type type, uint32_t rate, uint32_t packet_us,
						   uint32_t packet, uint32_t burst, uint8_t lro, uint16_t headroom,
						   uint16_t tailroom, uint32_t *bytes);
struct doca_ctx *doca_eth_rxq_as_doca_ctx(struct doca_eth_rxq *rxq);

#endif
