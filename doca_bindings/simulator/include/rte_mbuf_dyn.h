/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: what of DPDK's interface the adapter uses. */
#ifndef SIMULATED_RTE_MBUF_DYN_H
#define SIMULATED_RTE_MBUF_DYN_H

#include <stdint.h>

#include <rte_mbuf.h>

typedef uint64_t rte_mbuf_timestamp_t;

#define RTE_MBUF_DYNFIELD(buffer, offset, type) ((type)((uintptr_t)(buffer) + (offset)))

int rte_mbuf_dyn_rx_timestamp_register(int *offset, uint64_t *flag);

#endif
