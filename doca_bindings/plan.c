/* SPDX-License-Identifier: Apache-2.0 */
/* Options that cannot be are refused before anything of the card is touched. */
#include <stdio.h>
#include <string.h>

#include "adapter.h"

#define REFUSE(...) return say(DPUFLOW_DOCA_REFUSED, __VA_ARGS__)

/* hpf, vf0 to vf65534 or sf0 to sf65535. */
static bool is_representor(const char *name)
{
	unsigned int number;
	char after;

	if (!strcmp(name, "hpf"))
		return true;
	if (strncmp(name, "vf", 2) && strncmp(name, "sf", 2))
		return false;
	return sscanf(name + 2, "%5u%c", &number, &after) == 1 && number < 65536;
}

static bool ends(const char *text, size_t room)
{
	return memchr(text, '\0', room) != NULL;
}

static int check_names(const struct dpuflow_doca_options *options)
{
	unsigned int domain, bus, slot, function;
	char after;

	if (!ends(options->device, sizeof(options->device)) || !ends(options->peer, sizeof(options->peer)) ||
	    !ends(options->copy_to, sizeof(options->copy_to)))
		REFUSE("a name is too long");
	if (sscanf(options->device, "%x:%x:%x.%x%c", &domain, &bus, &slot, &function, &after) != 4)
		REFUSE("%s: not a PCI address: write it as 0000:03:00.0", options->device);
	if (!is_representor(options->peer))
		REFUSE("%s: no peer of the uplink: hpf is the host, vfN or sfN one of its functions", options->peer);
	if (options->copy_to[0] && !is_representor(options->copy_to))
		REFUSE("%s: nothing that copies can be sent to: name a scalable function, sfN", options->copy_to);
	if (!strcmp(options->copy_to, options->peer))
		REFUSE("%s: copies cannot go where the traffic itself goes", options->copy_to);
	return DPUFLOW_DOCA_OK;
}

static int check_method(const struct dpuflow_doca_options *options)
{
	if (options->method > DPUFLOW_DOCA_FLOOD)
		REFUSE("method %u: there is none of that number", options->method);
	if (options->method == DPUFLOW_DOCA_MIRROR && !HAS_MIRROR)
		REFUSE("DOCA %d.%d has no shared mirror (it was removed in 3.2): take flooding", RELEASE / 100,
		       RELEASE % 100);
	if (options->method == DPUFLOW_DOCA_FLOOD && !HAS_FLOODING)
		REFUSE("DOCA %d.%d cannot flood (3.1 was the first to): take the mirror", RELEASE / 100,
		       RELEASE % 100);
	if (options->production > DPUFLOW_DOCA_KERNEL)
		REFUSE("production %u: there is none of that number", options->production);
	if (options->production == DPUFLOW_DOCA_KERNEL && (options->method == DPUFLOW_DOCA_MIRROR || !HAS_FLOODING))
		REFUSE("the shared mirror wants a port for production: take the pair, not the kernel's way");
	return DPUFLOW_DOCA_OK;
}

int check_options(const struct dpuflow_doca_options *options)
{
	if (options->abi != DPUFLOW_DOCA_ABI || options->bytes != sizeof(*options))
		REFUSE("the adapter speaks version %d of its interface, and dpuflow version %u: make it anew with "
		       "`make doca`",
		       DPUFLOW_DOCA_ABI, options->abi);
	if (check_names(options) || check_method(options))
		return DPUFLOW_DOCA_REFUSED;
	if (!options->protocols || options->protocols > DPUFLOW_DOCA_ROCE + DPUFLOW_DOCA_TCP + DPUFLOW_DOCA_ANY)
		REFUSE("protocols %u: RoCE is 1, TCP 2, any 4", options->protocols);
	if (options->sample > 16)
		REFUSE("sample %u: the card draws 16 bits, so one of 2^16 at most", options->sample);
	if (options->qps > DPUFLOW_DOCA_QPS || options->opcodes > DPUFLOW_DOCA_OPCODES)
		REFUSE("at most %d QPs and %d opcodes can be named", DPUFLOW_DOCA_QPS, DPUFLOW_DOCA_OPCODES);
	if ((options->qps || options->opcodes) && !HAS_BTH)
		REFUSE("DOCA %d.%d cannot match QPs and opcodes (3.3 is the first to): leave them to dpuflow's own "
		       "filter",
		       RELEASE / 100, RELEASE % 100);
	if ((options->qps || options->opcodes) && options->protocols & DPUFLOW_DOCA_ANY)
		REFUSE("QPs and opcodes choose among RoCE: leave out any");
	if (options->snaplen < 64 || options->frame < 1518 || options->frame > 16384)
		REFUSE("64 bytes at least are kept of a packet, and the largest frame has 1518 to 16384");
	if (!options->copy_to[0] && options->ring < 1 << 16)
		REFUSE("a ring of %llu bytes is too small: 65536 at least", (unsigned long long)options->ring);
	return DPUFLOW_DOCA_OK;
}
