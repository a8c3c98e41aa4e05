/* SPDX-License-Identifier: Apache-2.0 */
/* Entries of pipes: added, and waited for, as an add that returns has only been handed to the card. */
#include <string.h>

#include "adapter.h"

#define WAIT_US 10000
#define WAITS 200 /* two seconds */

#if ENTRY_FLAGS
#define AT_ONCE DOCA_FLOW_ENTRY_FLAGS_NO_WAIT
#else
#define AT_ONCE DOCA_FLOW_NO_WAIT
#endif

struct progress {
	unsigned int done;
	bool failed;
};

/* DOCA calls it from doca_flow_entries_process, and when an entry goes with its pipe. */
void entry_done(struct doca_flow_pipe_entry *entry, uint16_t queue, enum doca_flow_entry_status status,
		enum doca_flow_entry_op op, void *context)
{
	struct progress *progress = context;

	(void)entry;
	(void)queue;
	(void)op;
	if (!progress)
		return;
	progress->done++;
	progress->failed |= status != DOCA_FLOW_ENTRY_STATUS_SUCCESS;
}

/* Its progress must outlive the entry: one for all, as entries are added one after the other. */
static struct progress progress;

static int wait_for_entry(struct dpuflow_doca *session, const char *name)
{
	struct doca_flow_port *port = doca_flow_port_switch_get(session->port[UPLINK]);
	doca_error_t error;

	for (unsigned int k = 0; k < WAITS && !progress.done; k++) {
		error = doca_flow_entries_process(port, 0, WAIT_US, 1);
		if (error != DOCA_SUCCESS)
			return failed(error, "the card does not answer for an entry of the pipe %s", name);
	}
	if (!progress.done)
		return say(DPUFLOW_DOCA_FAILED, "the card has not answered for an entry of the pipe %s in 2 s", name);
	if (progress.failed)
		return say(DPUFLOW_DOCA_FAILED, "the card refuses an entry of the pipe %s", name);
	return DPUFLOW_DOCA_OK;
}

int add_entry(struct dpuflow_doca *session, const char *name, struct doca_flow_pipe *pipe,
	      const struct doca_flow_match *match, const struct doca_flow_monitor *monitor,
	      const struct doca_flow_fwd *forward, struct doca_flow_pipe_entry **entry)
{
	struct doca_flow_match everything = {0};
	struct doca_flow_pipe_entry *made;
	doca_error_t error;

	memset(&progress, 0, sizeof(progress));
	if (!match)
		match = &everything;
#if BASIC_ADD_ENTRY
	error = doca_flow_pipe_basic_add_entry(0, pipe, match, 0, NULL, monitor, forward, AT_ONCE, &progress, &made);
#elif ACTION_INDEX
	error = doca_flow_pipe_add_entry(0, pipe, match, 0, NULL, monitor, forward, AT_ONCE, &progress, &made);
#else
	error = doca_flow_pipe_add_entry(0, pipe, match, NULL, monitor, forward, AT_ONCE, &progress, &made);
#endif
	if (error != DOCA_SUCCESS)
		return failed(error, "no entry can be added to the pipe %s", name);
	if (entry)
		*entry = made;
	return wait_for_entry(session, name);
}

int add_flood_entry(struct dpuflow_doca *session, const char *name, struct doca_flow_pipe *pipe, uint32_t index,
		    const struct doca_flow_fwd *forward)
{
#if HAS_FLOODING
	struct doca_flow_pipe_entry *made;
	doca_error_t error;

	memset(&progress, 0, sizeof(progress));
#if ACTION_INDEX
	error = doca_flow_pipe_hash_add_entry(0, pipe, index, 0, NULL, NULL, forward, AT_ONCE, &progress, &made);
#else
	error = doca_flow_pipe_hash_add_entry(0, pipe, index, NULL, NULL, forward, AT_ONCE, &progress, &made);
#endif
	if (error != DOCA_SUCCESS)
		return failed(error, "no entry can be added to the pipe %s", name);
	return wait_for_entry(session, name);
#else
	(void)session;
	(void)pipe;
	(void)index;
	(void)forward;
	return say(DPUFLOW_DOCA_REFUSED, "%s: this release does not flood", name);
#endif
}

int remove_entry(struct dpuflow_doca *session, const char *name, struct doca_flow_pipe_entry *entry)
{
	doca_error_t error;

	memset(&progress, 0, sizeof(progress));
#if RENAMED_REMOVE
	error = doca_flow_pipe_remove_entry(0, AT_ONCE, entry);
#else
	error = doca_flow_pipe_rm_entry(0, AT_ONCE, entry);
#endif
	if (error != DOCA_SUCCESS)
		return failed(error, "the entry of the pipe %s cannot be removed", name);
	return wait_for_entry(session, name);
}

int count_entry(struct doca_flow_pipe_entry *entry, uint64_t *packets)
{
	doca_error_t error;
#if RESOURCE_QUERY
	struct doca_flow_resource_query found = {0};

	error = doca_flow_resource_query_entry(entry, &found);
	*packets += found.counter.total_pkts;
#else
	struct doca_flow_query found = {0};

	error = doca_flow_query_entry(entry, &found);
	*packets += found.total_pkts;
#endif
	if (error != DOCA_SUCCESS)
		return failed(error, "the card's counters cannot be read");
	return DPUFLOW_DOCA_OK;
}
