/* SPDX-License-Identifier: Apache-2.0 */
/* Copies from DPDK's queues, 2.5 to 3.2: one queue for each lane, at the uplink's port. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

#if !QUEUES_WITHOUT_DPDK

#include <doca_dpdk.h>
#include <rte_eal.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>
#include <rte_mbuf_dyn.h>

#define BURST 64
#define RX_DESCRIPTORS 4096
#define TX_DESCRIPTORS 128
#define BUFFERS 16383 /* 2^n - 1, as DPDK advises */
#define CACHED 256

struct receive {
	struct rte_mempool *pool;
	bool probed;
	unsigned int started; /* ethdevs */
	uint16_t uplink;
	int stamp_at; /* where in an mbuf the card's stamp is; negative: nowhere */
	uint64_t stamp_flag;
};

/* A process may start DPDK once, so it stays started. */
static int start_dpdk(void)
{
	/*
	 * Devices that are not there, so that DPDK takes none by itself: those that the kernel uses would be lost
	 * to it, and "Probe again parameters aren't compatible" follows. Its arguments are written to.
	 */
	static char program[] = "dpuflow", allow[] = "-a", pci[] = "pci:00:00.0", auxiliary[] = "auxiliary:";
	static char quiet[] = "--log-level=error";
	static char *arguments[] = {program, quiet, allow, pci, allow, auxiliary, NULL};
	static bool done;
	int count = RELEASE >= 300 ? 6 : 4;

	if (done)
		return DPUFLOW_DOCA_OK;
	if (rte_eal_init(count, arguments) < 0)
		return say(DPUFLOW_DOCA_MISSING,
			   "DPDK does not start: is another DPDK or DOCA program running, or are "
			   "there no hugepages (doca-hugepages)?");
	done = true;
	return DPUFLOW_DOCA_OK;
}

/* As mlx5 names representors: 65535 stands for the host. */
static void driver_name(const char *name, char *driver, size_t room)
{
	if (!strcmp(name, "hpf"))
		snprintf(driver, room, "vf65535");
	else
		snprintf(driver, room, "%s", name);
}

static int probe(struct dpuflow_doca *session)
{
	/* fdb_def_rule_en=1: the kernel's own rules stay, and forward while there is no root, or again after us. */
	const char *rest = RELEASE < 300 ? "repr_matching_en=0," : "";
	const struct dpuflow_doca_options *options = &session->options;
	char peer[24], copies[24], arguments[160];
	doca_error_t error;

	driver_name(options->peer, peer, sizeof(peer));
	driver_name(options->copy_to, copies, sizeof(copies));
	if (options->copy_to[0])
		snprintf(arguments, sizeof(arguments), "dv_flow_en=2,fdb_def_rule_en=1,%srepresentor=(%s,%s)", rest,
			 peer, copies);
	else
		snprintf(arguments, sizeof(arguments), "dv_flow_en=2,fdb_def_rule_en=1,%srepresentor=%s", rest, peer);
	error = doca_dpdk_port_probe(session->device, arguments);
	if (error != DOCA_SUCCESS)
		return failed(error, "%s: DPDK does not take the card and its representors %s %s", options->device,
			      options->peer, options->copy_to);
	session->receive->probed = true;
	return DPUFLOW_DOCA_OK;
}

/* Which of DPDK's ports is which: by their names, as the order differs between releases. */
static int find_ports(struct dpuflow_doca *session)
{
	char name[RTE_ETH_NAME_MAX_LEN], wanted[MAX_PORTS][24];
	bool found[MAX_PORTS] = {false};
	uint16_t port;

	driver_name(session->options.peer, wanted[PEER], sizeof(wanted[PEER]));
	driver_name(session->options.copy_to, wanted[COPIES], sizeof(wanted[COPIES]));
	RTE_ETH_FOREACH_DEV (port) {
		struct rte_eth_dev_info info;
		unsigned int place = UPLINK;

		memset(&info, 0, sizeof(info));
		if (rte_eth_dev_info_get(port, &info) < 0 || rte_eth_dev_get_name_by_port(port, name) < 0)
			return say(DPUFLOW_DOCA_FAILED, "DPDK does not know its port %u", port);
		if (info.dev_flags && *info.dev_flags & RTE_ETH_DEV_REPRESENTOR) {
			size_t length = strlen(name);

			for (place = PEER; place < session->ports; place++) {
				size_t tail = strlen(wanted[place]);

				if (length >= tail && !strcmp(name + length - tail, wanted[place]))
					break;
			}
			if (place == session->ports)
				continue;
		}
		if (found[place])
			return say(DPUFLOW_DOCA_FAILED, "DPDK has several ports that may be %s", name);
		found[place] = true;
		session->number[place] = port;
	}
	for (unsigned int place = 0; place < session->ports; place++)
		if (!found[place])
			return say(DPUFLOW_DOCA_MISSING, "%s has no port %s", session->options.device,
				   place == UPLINK ? "of its own"
				   : place == PEER ? session->options.peer
						   : session->options.copy_to);
	session->receive->uplink = session->number[UPLINK];
	return DPUFLOW_DOCA_OK;
}

static int start_device(struct dpuflow_doca *session, uint16_t port)
{
	struct receive *receive = session->receive;
	struct rte_eth_dev_info info;
	struct rte_eth_conf config;
	int status;

	memset(&config, 0, sizeof(config));
	memset(&info, 0, sizeof(info));
	status = rte_eth_dev_info_get(port, &info);
	/* The representor's MTU says nothing of the frames that are copied: room for the largest. */
	config.rxmode.mtu = session->options.frame - RTE_ETHER_HDR_LEN - RTE_ETHER_CRC_LEN;
	if (info.max_mtu && config.rxmode.mtu > info.max_mtu)
		config.rxmode.mtu = info.max_mtu;
	if (receive->stamp_at >= 0 && info.rx_offload_capa & RTE_ETH_RX_OFFLOAD_TIMESTAMP)
		config.rxmode.offloads |= RTE_ETH_RX_OFFLOAD_TIMESTAMP;
	if (!status)
		status = rte_eth_dev_configure(port, LANES, LANES, &config);
	for (uint16_t queue = 0; queue < LANES && !status; queue++) {
		status = rte_eth_rx_queue_setup(port, queue, RX_DESCRIPTORS, rte_eth_dev_socket_id(port), NULL,
						receive->pool);
		if (!status)
			status = rte_eth_tx_queue_setup(port, queue, TX_DESCRIPTORS, rte_eth_dev_socket_id(port),
							NULL);
	}
	if (!status)
		status = rte_eth_dev_start(port);
	if (status)
		return say(DPUFLOW_DOCA_FAILED, "DPDK cannot start the queues of its port %u (%d)", port, status);
	return DPUFLOW_DOCA_OK;
}

int receive_open(struct dpuflow_doca *session)
{
	struct receive *receive = calloc(1, sizeof(*receive));
	int status;

	if (!receive)
		return say(DPUFLOW_DOCA_MISSING, "no memory for the receiver");
	session->receive = receive;
	status = start_dpdk();
	if (!status && rte_mbuf_dyn_rx_timestamp_register(&receive->stamp_at, &receive->stamp_flag) < 0)
		receive->stamp_at = -1;
	if (!status)
		status = probe(session);
	if (!status)
		status = find_ports(session);
	if (status)
		return status;
	receive->pool =
		rte_pktmbuf_pool_create("dpuflow", BUFFERS, CACHED, 0, RTE_PKTMBUF_HEADROOM + session->options.frame,
					rte_eth_dev_socket_id(receive->uplink));
	if (!receive->pool)
		return say(DPUFLOW_DOCA_MISSING,
			   "no hugepages for %d buffers of %u bytes: reserve them with doca-hugepages", BUFFERS,
			   session->options.frame);
	for (unsigned int place = 0; place < session->ports && !status; place++) {
		status = start_device(session, session->number[place]);
		receive->started += !status;
	}
	return status;
}

/* A frame's bytes, over as many buffers as it takes. */
static bool gather(const struct rte_mbuf *buffer, uint8_t *to, uint32_t wanted)
{
	while (buffer && wanted) {
		uint32_t bytes = rte_pktmbuf_data_len(buffer);

		if (bytes > wanted)
			bytes = wanted;
		memcpy(to, rte_pktmbuf_mtod(buffer, const uint8_t *), bytes);
		to += bytes;
		wanted -= bytes;
		buffer = buffer->next;
	}
	return !wanted;
}

unsigned int receive_some(struct dpuflow_doca *session)
{
	struct receive *receive = session->receive;
	struct rte_mbuf *buffers[BURST];
	unsigned int total = 0;

	for (uint16_t queue = 0; queue < LANES; queue++) {
		uint16_t count = rte_eth_rx_burst(receive->uplink, queue, buffers, BURST);
		uint64_t now = count ? wall_clock() : 0;

		for (uint16_t k = 0; k < count; k++) {
			uint64_t stamp = now;
			uint32_t captured;
			uint8_t *to;

			if (receive->stamp_at >= 0 && buffers[k]->ol_flags & receive->stamp_flag)
				stamp = best_stamp(session,
						   *RTE_MBUF_DYNFIELD(buffers[k], receive->stamp_at,
								      rte_mbuf_timestamp_t *),
						   now);
			to = ring_reserve(session, rte_pktmbuf_pkt_len(buffers[k]), stamp, queue, &captured);
			if (to && gather(buffers[k], to, captured))
				ring_submit(session);
			else if (to)
				atomic_fetch_add_explicit(&session->broken, 1, memory_order_relaxed);
			rte_pktmbuf_free(buffers[k]);
		}
		total += count;
	}
	atomic_fetch_add_explicit(&session->received, total, memory_order_relaxed);
	return total;
}

int receive_missed(struct dpuflow_doca *session, uint64_t *packets)
{
	struct rte_eth_stats stats;

	memset(&stats, 0, sizeof(stats));
	if (rte_eth_stats_get(session->receive->uplink, &stats))
		return say(DPUFLOW_DOCA_FAILED, "DPDK does not tell what its queues have lost");
	*packets = stats.imissed + stats.rx_nombuf;
	return DPUFLOW_DOCA_OK;
}

int receive_close(struct dpuflow_doca *session)
{
	struct receive *receive = session->receive;

	if (!receive)
		return DPUFLOW_DOCA_OK;
	while (receive->started-- > 0)
		if (rte_eth_dev_stop(session->number[receive->started]))
			say(DPUFLOW_DOCA_FAILED, "DPDK cannot stop its port %u", session->number[receive->started]);
	if (receive->probed) {
		uint16_t port;

		RTE_ETH_FOREACH_DEV (port) {
			if (rte_eth_dev_close(port))
				say(DPUFLOW_DOCA_FAILED, "DPDK cannot close its port %u", port);
		}
	}
	rte_mempool_free(receive->pool);
	free(receive);
	session->receive = NULL;
	return DPUFLOW_DOCA_OK;
}

#else
typedef int receive_dpdk_is_empty;
#endif
