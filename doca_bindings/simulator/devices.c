/* SPDX-License-Identifier: Apache-2.0 */
/* doca_dev: one card at 0000:03:00.0, with representors of the host, VF 0 and SF 7. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define ADDRESS "0000:03:00.0"

struct doca_devinfo {
	int number;
};

struct doca_devinfo_rep {
	enum card_port port;
	struct doca_dev *device;
};

doca_error_t doca_devinfo_create_list(struct doca_devinfo ***list, uint32_t *count)
{
	CALL();
	*list = malloc(2 * sizeof(**list));
	for (int k = 0; k < 2; k++) {
		(*list)[k] = malloc(sizeof(***list));
		(*list)[k]->number = k;
	}
	*count = 2;
	sim_made(KIND_LIST);
	return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_destroy_list(struct doca_devinfo **list)
{
	for (int k = 0; k < 2; k++)
		free(list[k]);
	free(list);
	sim_gone(KIND_LIST);
	return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_is_equal_pci_addr(const struct doca_devinfo *info, const char *address, uint8_t *equal)
{
	CALL();
	/* The second one is the card's other port. */
	*equal = !strcmp(address, info->number ? "0000:03:00.1" : ADDRESS) ||
		 !strcmp(address, (info->number ? "0000:03:00.1" : ADDRESS) + 5);
	return DOCA_SUCCESS;
}

doca_error_t doca_dev_open(struct doca_devinfo *info, struct doca_dev **dev)
{
	CALL();
	if (info->number)
		return sim_no(DOCA_ERROR_NOT_SUPPORTED, "the second port is not simulated");
	*dev = calloc(1, sizeof(**dev));
	sim_made(KIND_DEVICE);
	return DOCA_SUCCESS;
}

doca_error_t doca_dev_close(struct doca_dev *dev)
{
	CALL();
	if (dev->users)
		return sim_no(DOCA_ERROR_IN_USE, "a device is closed that is in use");
	free(dev);
	sim_gone(KIND_DEVICE);
	return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_rep_create_list(struct doca_dev *dev, int filter, struct doca_devinfo_rep ***list,
					  uint32_t *count)
{
	CALL();
	if (filter != DOCA_DEVINFO_REP_FILTER_NET)
		return sim_no(DOCA_ERROR_NOT_SUPPORTED, "this filter is not simulated");
	*list = malloc(4 * sizeof(**list));
	*count = 3;
	for (int k = 0; k < 3; k++) {
		(*list)[k] = malloc(sizeof(***list));
		(*list)[k]->port = CARD_HOST + k;
		(*list)[k]->device = dev;
	}
	(*list)[3] = NULL;
	sim_made(KIND_REP_LIST);
	return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_rep_destroy_list(struct doca_devinfo_rep **list)
{
	for (int k = 0; list[k]; k++)
		free(list[k]);
	free(list);
	sim_gone(KIND_REP_LIST);
	return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_rep_get_pci_func_type(const struct doca_devinfo_rep *info, enum doca_pci_func_type *type)
{
	CALL();
	*type = info->port == CARD_HOST ? DOCA_PCI_FUNC_TYPE_PF
		: info->port == CARD_VF ? DOCA_PCI_FUNC_TYPE_VF
					: DOCA_PCI_FUNC_TYPE_SF;
	return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_rep_get_vuid(const struct doca_devinfo_rep *info, char *vuid, uint32_t size)
{
	CALL();
	snprintf(vuid, size, "MT2306XZ00AGMLNXS0D0F0%s", info->port == CARD_VF ? "VF1" : "");
	return DOCA_SUCCESS;
}

#if SIMULATED >= 301
doca_error_t doca_devinfo_rep_get_sf_index(const struct doca_devinfo_rep *info, uint32_t *index)
{
	CALL();
	if (info->port != CARD_SF)
		return DOCA_ERROR_NOT_SUPPORTED;
	*index = 7;
	return DOCA_SUCCESS;
}
#endif

doca_error_t doca_dev_rep_open(struct doca_devinfo_rep *info, struct doca_dev_rep **rep)
{
	CALL();
	*rep = calloc(1, sizeof(**rep));
	(*rep)->port = info->port;
	(*rep)->device = info->device;
	info->device->users++;
	sim_made(KIND_REP);
	return DOCA_SUCCESS;
}

doca_error_t doca_dev_rep_close(struct doca_dev_rep *rep)
{
	CALL();
	if (rep->users)
		return sim_no(DOCA_ERROR_IN_USE, "a representor is closed whose port runs");
	rep->device->users--;
	free(rep);
	sim_gone(KIND_REP);
	return DOCA_SUCCESS;
}
