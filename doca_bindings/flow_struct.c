/* SPDX-License-Identifier: Apache-2.0 */
/* DOCA Flow, its ports and pipes while their settings were plain structs: 2.5 and 2.6. */
#include <stdio.h>

#include "adapter.h"

#if !OPAQUE_CONFIG

int start_flow(struct dpuflow_doca *session)
{
	struct doca_flow_cfg config = {
		.queues = LANES,
		.resource.nb_counters = COUNTERS, /* without a quota counters fail or stay 0 */
		.mode_args = "switch,hws",	  /* not isolated: copies would not reach the queues */
		.cb = entry_done,
	};
	doca_error_t error;

	/* Ids begin at 1, as 0 says that there is no mirror: the quota is the highest id + 1. */
	config.nr_shared_resources[DOCA_FLOW_SHARED_RESOURCE_MIRROR] = LANES + 1;
	error = doca_flow_init(&config);
	if (error != DOCA_SUCCESS)
		return failed(error, "DOCA Flow does not start");
	session->flow = true;
	return DPUFLOW_DOCA_OK;
}

int start_port(struct dpuflow_doca *session, unsigned int place)
{
	char number[8];
	struct doca_flow_port_cfg config = {
		.port_id = session->number[place],
		.type = DOCA_FLOW_PORT_DPDK_BY_ID,
		.devargs = number,
		.dev = place == UPLINK ? session->device : NULL,
	};
	doca_error_t error;

	snprintf(number, sizeof(number), "%u", session->number[place]);
	error = doca_flow_port_start(&config, &session->port[place]);
	if (error != DOCA_SUCCESS)
		return failed(error,
			      "%s: port %u does not start: does another program own the eSwitch (OVS with doca-init, "
			      "HBN, DPF), or this function none?",
			      session->options.device, session->number[place]);
	return DPUFLOW_DOCA_OK;
}

int make_pipe(struct dpuflow_doca *session, const struct pipe_plan *plan, struct doca_flow_pipe **pipe)
{
	struct doca_flow_match everything = {0};
	struct doca_flow_pipe_cfg config = {
		.attr.name = plan->name,
		.attr.type = DOCA_FLOW_PIPE_BASIC, /* flooding came with 3.1 */
		.attr.is_root = plan->root,
		.attr.nb_flows = plan->entries,
		.port = doca_flow_port_switch_get(session->port[UPLINK]),
		.match = (struct doca_flow_match *)(plan->match ? plan->match : &everything),
		.match_mask = (struct doca_flow_match *)plan->mask,
		.monitor = (struct doca_flow_monitor *)plan->monitor,
	};
	doca_error_t error = doca_flow_pipe_create(&config, plan->forward, plan->miss, pipe);

	if (error != DOCA_SUCCESS)
		return failed(error, "the pipe %s cannot be made", plan->name);
	return DPUFLOW_DOCA_OK;
}

#else
typedef int flow_struct_is_empty;
#endif
