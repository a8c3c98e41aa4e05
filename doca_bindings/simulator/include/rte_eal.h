/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: what of DPDK's interface the adapter uses. */
#ifndef SIMULATED_RTE_EAL_H
#define SIMULATED_RTE_EAL_H

int rte_eal_init(int count, char **arguments);

#endif
