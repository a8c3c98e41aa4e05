/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: what of DPDK's interface the adapter uses. Layouts are its own. */
#ifndef SIMULATED_RTE_MBUF_H
#define SIMULATED_RTE_MBUF_H

#include <stdint.h>

#define RTE_PKTMBUF_HEADROOM 128

struct rte_mempool;

struct rte_mbuf {
	struct rte_mbuf *next;
	uint64_t ol_flags;
	uint64_t stamp;
	uint8_t *bytes;
	uint32_t pkt_len;
	uint16_t data_len;
	struct rte_mempool *pool;
};

#define rte_pktmbuf_mtod(buffer, type) ((type)(buffer)->bytes)
#define rte_pktmbuf_data_len(buffer) ((buffer)->data_len)
#define rte_pktmbuf_pkt_len(buffer) ((buffer)->pkt_len)

struct rte_mempool *rte_pktmbuf_pool_create(const char *name, unsigned int count, unsigned int cached,
					    uint16_t private_bytes, uint16_t room, int socket);
void rte_mempool_free(struct rte_mempool *pool);
void rte_pktmbuf_free(struct rte_mbuf *buffer);

#endif
