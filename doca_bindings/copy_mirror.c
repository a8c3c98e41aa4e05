/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies by the shared mirror, 2.5 to 3.1: configured, bound to the port (nothing happens without), and then named
 * by the pipes that choose.
 */
#include <string.h>

#include "adapter.h"

#if HAS_MIRROR

static doca_error_t configure(uint32_t id, struct doca_flow_shared_resource_cfg *config)
{
#if RENAMED_MIRROR_CONFIG
	return doca_flow_shared_resource_set_cfg(DOCA_FLOW_SHARED_RESOURCE_MIRROR, id, config);
#else
	return doca_flow_shared_resource_cfg(DOCA_FLOW_SHARED_RESOURCE_MIRROR, id, config);
#endif
}

int make_mirror(struct dpuflow_doca *session, struct lane *lane)
{
	struct doca_flow_shared_resource_cfg config;
	struct doca_flow_mirror_target target;
	uint32_t id = lane->number + 1; /* 0 is no mirror */
	doca_error_t error;

	memset(&config, 0, sizeof(config));
	memset(&target, 0, sizeof(target));
	/* A pipe, as a queue named here directly is refused ("Invalid mirror list format"). */
	target.fwd.type = DOCA_FLOW_FWD_PIPE;
	target.fwd.next_pipe = lane->copy;
	config.mirror_cfg.nr_targets = 1;
	config.mirror_cfg.target = &target;
#if MIRROR_FORWARDS
	/* Where the original goes. Left empty it is dropped, and RoCE goes dark without an error. */
	config.mirror_cfg.fwd.type = DOCA_FLOW_FWD_PORT;
	config.mirror_cfg.fwd.port_id = lane->out;
#endif /* else it must be empty (bind fails with syndrome 0x6d3a25), and the entry's forward takes the original */
	error = configure(id, &config);
	if (error != DOCA_SUCCESS)
		return failed(error, "the mirror %u cannot be configured", id);
	error = doca_flow_shared_resources_bind(DOCA_FLOW_SHARED_RESOURCE_MIRROR, &id, 1,
						doca_flow_port_switch_get(session->port[UPLINK]));
	if (error != DOCA_SUCCESS)
		return failed(error, "the mirror %u cannot be bound to the port", id);
	lane->mirror = id;
	return DPUFLOW_DOCA_OK;
}

#else

int make_mirror(struct dpuflow_doca *session, struct lane *lane)
{
	(void)session;
	(void)lane;
	return say(DPUFLOW_DOCA_REFUSED, "this release has no shared mirror");
}

#endif
