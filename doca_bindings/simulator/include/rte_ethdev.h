/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: what of DPDK's interface the adapter uses. Layouts are its own. */
#ifndef SIMULATED_RTE_ETHDEV_H
#define SIMULATED_RTE_ETHDEV_H

#include <stdint.h>

#include <rte_mbuf.h>

#define RTE_ETHER_HDR_LEN 14
#define RTE_ETHER_CRC_LEN 4
#define RTE_ETH_NAME_MAX_LEN 64
#define RTE_ETH_DEV_REPRESENTOR (1u << 4)
#define RTE_ETH_RX_OFFLOAD_TIMESTAMP (1ull << 14)
#define RTE_MAX_ETHPORTS 32

struct rte_eth_conf {
	struct {
		uint32_t mtu;
		uint64_t offloads;
	} rxmode;
};

struct rte_eth_dev_info {
	uint16_t max_mtu;
	uint64_t rx_offload_capa;
	const uint32_t *dev_flags;
};

struct rte_eth_stats {
	uint64_t imissed;
	uint64_t rx_nombuf;
};

struct rte_eth_rxconf;
struct rte_eth_txconf;

uint16_t rte_eth_find_next(uint16_t port);
#define RTE_ETH_FOREACH_DEV(port)                                                                              \
	for ((port) = rte_eth_find_next(0); (port) < RTE_MAX_ETHPORTS; (port) = rte_eth_find_next((port) + 1))

int rte_eth_dev_info_get(uint16_t port, struct rte_eth_dev_info *info);
int rte_eth_dev_get_name_by_port(uint16_t port, char *name);
int rte_eth_dev_socket_id(uint16_t port);
int rte_eth_dev_configure(uint16_t port, uint16_t rx, uint16_t tx, const struct rte_eth_conf *config);
int rte_eth_rx_queue_setup(uint16_t port, uint16_t queue, uint16_t descriptors, unsigned int socket,
			   const struct rte_eth_rxconf *config, struct rte_mempool *pool);
int rte_eth_tx_queue_setup(uint16_t port, uint16_t queue, uint16_t descriptors, unsigned int socket,
			   const struct rte_eth_txconf *config);
int rte_eth_dev_start(uint16_t port);
int rte_eth_dev_stop(uint16_t port);
int rte_eth_dev_close(uint16_t port);
uint16_t rte_eth_rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **buffers, uint16_t room);
int rte_eth_stats_get(uint16_t port, struct rte_eth_stats *stats);

#endif
