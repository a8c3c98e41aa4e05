/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: the names, values and signatures of DOCA's documented interface that it has. */
#ifndef SIMULATED_DOCA_MMAP_H
#define SIMULATED_DOCA_MMAP_H

#include <stddef.h>
#include <stdint.h>

#include <doca_error.h>
#include <doca_types.h>

struct doca_dev;
struct doca_mmap;

doca_error_t doca_mmap_create(struct doca_mmap **map);
doca_error_t doca_mmap_destroy(struct doca_mmap *map);
doca_error_t doca_mmap_set_permissions(struct doca_mmap *map, uint32_t access);
doca_error_t doca_mmap_set_memrange(struct doca_mmap *map, void *memory, size_t bytes);
doca_error_t doca_mmap_set_max_num_devices(struct doca_mmap *map, uint32_t count);
doca_error_t doca_mmap_add_dev(struct doca_mmap *map, struct doca_dev *dev);
doca_error_t doca_mmap_start(struct doca_mmap *map);

#endif
