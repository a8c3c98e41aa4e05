/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: the names, values and signatures of DOCA's documented interface that it has. */
#ifndef SIMULATED_DOCA_DPDK_H
#define SIMULATED_DOCA_DPDK_H

#include <doca_error.h>

struct doca_dev;

doca_error_t doca_dpdk_port_probe(struct doca_dev *dev, const char *arguments);

#endif
