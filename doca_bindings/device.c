/* SPDX-License-Identifier: Apache-2.0 */
/* The card and, where the release wants handles for them, its representors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

uint32_t count_devices(void)
{
	struct doca_devinfo **list;
	uint32_t count;

	if (doca_devinfo_create_list(&list, &count) != DOCA_SUCCESS)
		return 0;
	doca_devinfo_destroy_list(list);
	return count;
}

#if REPRESENTOR_HANDLE
/* Whether it is the one: hpf by its kind, functions by their numbers. */
static bool is_wanted(const struct doca_devinfo_rep *info, const char *name)
{
	enum doca_pci_func_type type;
	char vuid[DOCA_DEVINFO_REP_VUID_SIZE];
	uint32_t number, wanted;
	const char *at;

	if (doca_devinfo_rep_get_pci_func_type(info, &type) != DOCA_SUCCESS)
		return false;
	if (!strcmp(name, "hpf"))
		return type == DOCA_PCI_FUNC_TYPE_PF;
	wanted = strtoul(name + 2, NULL, 10);
	if (name[0] == 's')
		return doca_devinfo_rep_get_sf_index(info, &number) == DOCA_SUCCESS && number == wanted;
	if (type != DOCA_PCI_FUNC_TYPE_VF || doca_devinfo_rep_get_vuid(info, vuid, sizeof(vuid)) != DOCA_SUCCESS)
		return false;
	at = strstr(vuid, "VF"); /* ...PF0VF3: counted from 1 */
	return at && strtoul(at + 2, NULL, 10) == wanted + 1;
}

static int open_representor(struct dpuflow_doca *session, unsigned int place, const char *name)
{
	struct doca_devinfo_rep **list;
	doca_error_t error;
	uint32_t count, k;

	error = doca_devinfo_rep_create_list(session->device, DOCA_DEVINFO_REP_FILTER_NET, &list, &count);
	if (error != DOCA_SUCCESS)
		return failed(error,
			      "%s: its representors cannot be listed: is the card in DPU mode, with switchdev?",
			      session->options.device);
	for (k = 0; k < count && !is_wanted(list[k], name); k++)
		;
	if (k < count)
		error = doca_dev_rep_open(list[k], &session->representor[place]);
	doca_devinfo_rep_destroy_list(list);
	if (k == count)
		return say(DPUFLOW_DOCA_MISSING, "%s has no representor %s", session->options.device, name);
	if (error != DOCA_SUCCESS)
		return failed(error, "the representor %s cannot be opened", name);
	return DPUFLOW_DOCA_OK;
}
#endif

int open_device(struct dpuflow_doca *session)
{
	const char *address = session->options.device;
	struct doca_devinfo **list;
	doca_error_t error;
	uint32_t count, k;
	uint8_t equal = 0;

	error = doca_devinfo_create_list(&list, &count);
	if (error != DOCA_SUCCESS)
		return failed(error, "DOCA cannot list its devices");
	for (k = 0; k < count; k++) {
		equal = 0;
		if (doca_devinfo_is_equal_pci_addr(list[k], address, &equal) == DOCA_SUCCESS && equal)
			break;
	}
	if (equal)
		error = doca_dev_open(list[k], &session->device);
	doca_devinfo_destroy_list(list);
	if (!equal)
		return say(DPUFLOW_DOCA_MISSING, "%s: not one of the %u devices that DOCA sees here", address, count);
	if (error != DOCA_SUCCESS)
		return failed(error, "%s cannot be opened", address);
#if REPRESENTOR_HANDLE
	if (open_representor(session, PEER, session->options.peer))
		return DPUFLOW_DOCA_FAILED;
	if (session->options.copy_to[0] && open_representor(session, COPIES, session->options.copy_to))
		return DPUFLOW_DOCA_FAILED;
#endif
	return DPUFLOW_DOCA_OK;
}

void close_device(struct dpuflow_doca *session)
{
	doca_error_t error;

	for (unsigned int place = MAX_PORTS; place-- > 0;) {
		if (!session->representor[place])
			continue;
		error = doca_dev_rep_close(session->representor[place]);
		if (error != DOCA_SUCCESS) /* what kept it may just be ending */
			error = doca_dev_rep_close(session->representor[place]);
		if (error != DOCA_SUCCESS)
			failed(error, "a representor cannot be closed");
		session->representor[place] = NULL;
	}
	if (!session->device)
		return;
	error = doca_dev_close(session->device);
	if (error != DOCA_SUCCESS)
		error = doca_dev_close(session->device);
	if (error != DOCA_SUCCESS)
		failed(error, "%s cannot be closed", session->options.device);
	session->device = NULL;
}
