/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: the names, values and signatures of DOCA's documented interface that it has. */
#ifndef SIMULATED_DOCA_DEV_H
#define SIMULATED_DOCA_DEV_H

#include <stdint.h>

#include <doca_error.h>
#include <doca_version.h>

#define DOCA_DEVINFO_REP_VUID_SIZE 128

struct doca_dev;
struct doca_devinfo;
struct doca_dev_rep;
struct doca_devinfo_rep;

enum doca_devinfo_rep_filter {
	DOCA_DEVINFO_REP_FILTER_ALL = 0,
	DOCA_DEVINFO_REP_FILTER_NET = 1 << 1,
	DOCA_DEVINFO_REP_FILTER_EMULATED = 1 << 2,
};

enum doca_pci_func_type {
	DOCA_PCI_FUNC_TYPE_PF = 0,
	DOCA_PCI_FUNC_TYPE_VF,
	DOCA_PCI_FUNC_TYPE_SF,
};

doca_error_t doca_devinfo_create_list(struct doca_devinfo ***list, uint32_t *count);
doca_error_t doca_devinfo_destroy_list(struct doca_devinfo **list);
doca_error_t doca_devinfo_is_equal_pci_addr(const struct doca_devinfo *info, const char *address, uint8_t *equal);
doca_error_t doca_dev_open(struct doca_devinfo *info, struct doca_dev **dev);
doca_error_t doca_dev_close(struct doca_dev *dev);

doca_error_t doca_devinfo_rep_create_list(struct doca_dev *dev, int filter, struct doca_devinfo_rep ***list,
					  uint32_t *count);
doca_error_t doca_devinfo_rep_destroy_list(struct doca_devinfo_rep **list);
doca_error_t doca_devinfo_rep_get_pci_func_type(const struct doca_devinfo_rep *info, enum doca_pci_func_type *type);
doca_error_t doca_devinfo_rep_get_vuid(const struct doca_devinfo_rep *info, char *vuid, uint32_t size);
doca_error_t doca_dev_rep_open(struct doca_devinfo_rep *info, struct doca_dev_rep **rep);
doca_error_t doca_dev_rep_close(struct doca_dev_rep *rep);
#if SIMULATED >= 301
doca_error_t doca_devinfo_rep_get_sf_index(const struct doca_devinfo_rep *info, uint32_t *index);
#endif

#endif
