/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies by a hash pipe that floods, from 3.1: every packet goes to every entry. Entry 0 is production, as the
 * order of packets is kept for that one alone; entry 1 is the copy. Both forward to pipes, since all entries of a
 * pipe share the kind of their forward; there are two of them, a power of two as it must be.
 */
#include <string.h>

#include "adapter.h"

#if HAS_FLOODING

#define WAYS 2

int make_flood(struct dpuflow_doca *session, struct lane *lane)
{
	const char *name = lane->number ? "flood to the uplink" : "flood to the peer";
	struct doca_flow_fwd each = {.type = DOCA_FLOW_FWD_PIPE};
	struct pipe_plan plan = {.name = name, .floods = true, .entries = WAYS, .forward = &each};
	int status = make_pipe(session, &plan, &lane->flood);

	each.next_pipe = lane->pass;
	if (!status)
		status = add_flood_entry(session, name, lane->flood, 0, &each);
	each.next_pipe = lane->copy;
	if (!status)
		status = add_flood_entry(session, name, lane->flood, 1, &each);
	return status;
}

#else

int make_flood(struct dpuflow_doca *session, struct lane *lane)
{
	(void)session;
	(void)lane;
	return say(DPUFLOW_DOCA_REFUSED, "this release does not flood");
}

#endif

/* Where packets go that are to be copied. */
void forward_chosen(const struct dpuflow_doca *session, const struct lane *lane, struct doca_flow_fwd *forward)
{
	memset(forward, 0, sizeof(*forward));
#if HAS_FLOODING
	if (session->flood) {
		forward->type = DOCA_FLOW_FWD_HASH_PIPE;
		forward->hash_pipe.pipe = lane->flood;
		forward->hash_pipe.algorithm = DOCA_FLOW_PIPE_HASH_MAP_ALGORITHM_FLOODING;
		return;
	}
#else
	(void)session;
#endif
	forward->type = DOCA_FLOW_FWD_PORT;
	forward->port_id = lane->out;
}
