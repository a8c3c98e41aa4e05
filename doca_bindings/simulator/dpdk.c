/* SPDX-License-Identifier: Apache-2.0 */
/* DPDK as far as the adapter uses it: the card's receive queues as ethdevs, up to 3.2. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#if SIMULATED < 303

#include <doca_dpdk.h>
#include <rte_eal.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>
#include <rte_mbuf_dyn.h>

#define STAMPED (1ull << 40)

struct rte_mempool {
	unsigned int count, out;
	uint16_t room;
};

static struct {
	bool there, configured, started;
	enum card_port port;
	uint16_t queues;
	bool stamps;
	struct rte_mempool *pool;
	unsigned int set_up;
} ethdevs[CARD_PORTS];

static struct doca_dev *probed;

int rte_eal_init(int count, char **arguments)
{
	bool allowed = false;

	if (sim_call(__func__))
		return -1;
	for (int k = 0; k + 1 < count; k++)
		allowed |= !strcmp(arguments[k], "-a") && !strcmp(arguments[k + 1], "pci:00:00.0");
	if (sim.eal || !allowed)
		return -1; /* once in a process; and it would have taken every device */
	sim.eal = true;
	return 0;
}

/* On 2.7 the representors came before the card's own port. */
static void attach(enum card_port port)
{
	for (int k = 0; k < CARD_PORTS; k++) {
		if (ethdevs[k].there)
			continue;
		ethdevs[k].there = true;
		ethdevs[k].port = port;
		sim_made(KIND_ETHDEV);
		return;
	}
}

doca_error_t doca_dpdk_port_probe(struct doca_dev *dev, const char *arguments)
{
	CALL();
	if (!sim.eal || dev->probed)
		return sim_no(DOCA_ERROR_BAD_STATE, "DPDK is not started, or the device was probed");
	if (!strstr(arguments, "dv_flow_en=2"))
		return sim_no(DOCA_ERROR_INVALID_VALUE, "hardware steering needs dv_flow_en=2");
	if (strstr(arguments, "fdb_def_rule_en=0"))
		sim.card->no_kernel_rules = true;
	if (SIMULATED >= 300 && strstr(arguments, "repr_matching_en"))
		return sim_no(DOCA_ERROR_DRIVER, "repr_matching_en is gone");
	if (SIMULATED != 207)
		attach(CARD_UPLINK);
	if (strstr(arguments, "vf65535"))
		attach(CARD_HOST);
	if (strstr(arguments, "vf0"))
		attach(CARD_VF);
	if (strstr(arguments, "sf7"))
		attach(CARD_SF);
	if (SIMULATED == 207)
		attach(CARD_UPLINK);
	dev->probed = true;
	dev->users++;
	probed = dev;
	return DOCA_SUCCESS;
}

uint16_t rte_eth_find_next(uint16_t port)
{
	while (port < CARD_PORTS && !ethdevs[port].there)
		port++;
	return port < CARD_PORTS ? port : RTE_MAX_ETHPORTS;
}

int rte_eth_dev_info_get(uint16_t port, struct rte_eth_dev_info *info)
{
	static const uint32_t none, representor = RTE_ETH_DEV_REPRESENTOR;

	if (sim_call(__func__))
		return -1;
	info->max_mtu = 9978;
	info->rx_offload_capa = RTE_ETH_RX_OFFLOAD_TIMESTAMP;
	info->dev_flags = ethdevs[port].port == CARD_UPLINK ? &none : &representor;
	return 0;
}

int rte_eth_dev_get_name_by_port(uint16_t port, char *name)
{
	static const char *const names[] = {"", "_representor_vf65535", "_representor_vf0", "_representor_sf7"};

	if (sim_call(__func__))
		return -1;
	snprintf(name, RTE_ETH_NAME_MAX_LEN, "0000:03:00.0%s", names[ethdevs[port].port]);
	return 0;
}

int rte_eth_dev_socket_id(uint16_t port)
{
	(void)port;
	return 0;
}

int rte_eth_dev_configure(uint16_t port, uint16_t rx, uint16_t tx, const struct rte_eth_conf *config)
{
	if (sim_call(__func__) || rx > CARD_QUEUES || tx > CARD_QUEUES || ethdevs[port].started)
		return -1;
	ethdevs[port].configured = true;
	ethdevs[port].queues = rx;
	ethdevs[port].set_up = 0;
	ethdevs[port].stamps = config->rxmode.offloads & RTE_ETH_RX_OFFLOAD_TIMESTAMP;
	return 0;
}

int rte_eth_rx_queue_setup(uint16_t port, uint16_t queue, uint16_t descriptors, unsigned int socket,
			   const struct rte_eth_rxconf *config, struct rte_mempool *pool)
{
	(void)descriptors;
	(void)socket;
	(void)config;
	if (sim_call(__func__) || !ethdevs[port].configured || queue >= ethdevs[port].queues || !pool)
		return -1;
	ethdevs[port].pool = pool;
	ethdevs[port].set_up++;
	return 0;
}

int rte_eth_tx_queue_setup(uint16_t port, uint16_t queue, uint16_t descriptors, unsigned int socket,
			   const struct rte_eth_txconf *config)
{
	(void)descriptors;
	(void)socket;
	(void)config;
	if (sim_call(__func__) || !ethdevs[port].configured || queue >= ethdevs[port].queues)
		return -1;
	return 0;
}

int rte_eth_dev_start(uint16_t port)
{
	if (sim_call(__func__) || ethdevs[port].set_up != ethdevs[port].queues)
		return -1;
	ethdevs[port].started = true;
	sim_made(KIND_RUNNING);
	return 0;
}

int rte_eth_dev_stop(uint16_t port)
{
	bool first = sim_call(__func__);

	if (ethdevs[port].started)
		sim_gone(KIND_RUNNING);
	ethdevs[port].started = false;
	return first ? -1 : 0;
}

int rte_eth_dev_close(uint16_t port)
{
	bool first = sim_call(__func__);

	if (ethdevs[port].started)
		return -1;
	memset(&ethdevs[port], 0, sizeof(ethdevs[port]));
	sim_gone(KIND_ETHDEV);
	if (rte_eth_find_next(0) == RTE_MAX_ETHPORTS && probed) {
		probed->users--;
		probed->probed = false;
		probed = NULL;
	}
	return first ? -1 : 0;
}

bool ethdev_started(unsigned int number)
{
	return number < CARD_PORTS && ethdevs[number].started;
}

enum card_port ethdev_port(unsigned int number)
{
	return number < CARD_PORTS ? ethdevs[number].port : CARD_UPLINK;
}

bool queue_there(unsigned int number)
{
	for (int k = 0; k < CARD_PORTS; k++)
		if (ethdevs[k].started && ethdevs[k].port == CARD_UPLINK)
			return number < ethdevs[k].queues;
	return false;
}

/* -- buffers ----------------------------------------------------------------------------------- */

struct rte_mempool *rte_pktmbuf_pool_create(const char *name, unsigned int count, unsigned int cached,
					    uint16_t private_bytes, uint16_t room, int socket)
{
	struct rte_mempool *pool;

	(void)name;
	(void)cached;
	(void)private_bytes;
	(void)socket;
	if (sim_call(__func__))
		return NULL;
	pool = calloc(1, sizeof(*pool));
	pool->count = count;
	pool->room = room - RTE_PKTMBUF_HEADROOM;
	sim_made(KIND_POOL);
	return pool;
}

void rte_mempool_free(struct rte_mempool *pool)
{
	if (!pool)
		return;
	if (pool->out)
		abort(); /* buffers were not given back */
	free(pool);
	sim_gone(KIND_POOL);
}

void rte_pktmbuf_free(struct rte_mbuf *buffer)
{
	while (buffer) {
		struct rte_mbuf *next = buffer->next;

		buffer->pool->out--;
		free(buffer->bytes);
		free(buffer);
		buffer = next;
	}
}

int rte_mbuf_dyn_rx_timestamp_register(int *offset, uint64_t *flag)
{
	if (sim_call(__func__))
		return -1;
	*offset = __builtin_offsetof(struct rte_mbuf, stamp);
	*flag = STAMPED;
	return 0;
}

static struct rte_mbuf *fill(struct rte_mempool *pool, const struct card_slot *slot, bool stamp)
{
	uint32_t room = sim.card->split ? sim.card->split : pool->room, at = 0;
	struct rte_mbuf *first = NULL, **link = &first;

	do {
		struct rte_mbuf *buffer = calloc(1, sizeof(*buffer));

		buffer->data_len = slot->length - at < room ? slot->length - at : room;
		buffer->bytes = malloc(buffer->data_len + 1);
		memcpy(buffer->bytes, slot->bytes + at, buffer->data_len);
		buffer->pkt_len = slot->length;
		buffer->pool = pool;
		buffer->stamp = slot->stamp_ns;
		buffer->ol_flags = stamp ? STAMPED : 0;
		pool->out++;
		at += buffer->data_len;
		*link = buffer;
		link = &buffer->next;
	} while (at < slot->length);
	return first;
}

uint16_t rte_eth_rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **buffers, uint16_t room)
{
	struct card_queue *from = &sim.card->queue[queue];
	uint16_t count = 0;

	if (!ethdevs[port].started || ethdevs[port].port != CARD_UPLINK)
		return 0;
	card_lock(sim.card);
	while (count < room && from->taken < from->written)
		buffers[count++] =
			fill(ethdevs[port].pool, &from->slot[from->taken++ % CARD_SLOTS], ethdevs[port].stamps);
	card_unlock(sim.card);
	return count;
}

int rte_eth_stats_get(uint16_t port, struct rte_eth_stats *stats)
{
	if (sim_call(__func__))
		return -1;
	stats->imissed = stats->rx_nombuf = 0;
	for (uint16_t queue = 0; queue < ethdevs[port].queues; queue++)
		stats->imissed += sim.card->queue[queue].dropped;
	return 0;
}

#else
typedef int dpdk_is_empty;
#endif
