/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: the names, values and signatures of DOCA's documented interface that it has. */
#ifndef SIMULATED_DOCA_BUF_H
#define SIMULATED_DOCA_BUF_H

#include <stddef.h>

#include <doca_error.h>

struct doca_buf;

doca_error_t doca_buf_get_data(const struct doca_buf *buffer, void **data);
doca_error_t doca_buf_get_data_len(const struct doca_buf *buffer, size_t *bytes);

#endif
