/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: the names, values and signatures of DOCA's documented interface that it has. */
#ifndef SIMULATED_DOCA_PE_H
#define SIMULATED_DOCA_PE_H

#include <stdint.h>

#include <doca_error.h>
#include <doca_types.h>

struct doca_ctx;
struct doca_pe;

doca_error_t doca_pe_create(struct doca_pe **engine);
doca_error_t doca_pe_destroy(struct doca_pe *engine);
doca_error_t doca_pe_connect_ctx(struct doca_pe *engine, struct doca_ctx *context);
uint8_t doca_pe_progress(struct doca_pe *engine);

#endif
