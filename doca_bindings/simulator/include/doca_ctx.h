/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: the names, values and signatures of DOCA's documented interface that it has. */
#ifndef SIMULATED_DOCA_CTX_H
#define SIMULATED_DOCA_CTX_H

#include <doca_error.h>

struct doca_ctx;

doca_error_t doca_ctx_start(struct doca_ctx *context);
doca_error_t doca_ctx_stop(struct doca_ctx *context);

#endif
