/* SPDX-License-Identifier: Apache-2.0 */
/* DOCA Flow, its ports and pipes since their settings have setters: from 2.7. */
#include <stdio.h>

#include "adapter.h"

#if OPAQUE_CONFIG

/* Room for modified headers, which nothing here modifies: a power of two, 64 at least. */
#define ACTION_BYTES 4096

#define SET(call)                                                                                                    \
	do {                                                                                                         \
		if (error == DOCA_SUCCESS)                                                                           \
			error = (call);                                                                              \
	} while (0)

int start_flow(struct dpuflow_doca *session)
{
	struct doca_flow_cfg *config;
	doca_error_t error = doca_flow_cfg_create(&config);

	if (error != DOCA_SUCCESS)
		return failed(error, "DOCA Flow has no room for its settings");
	SET(doca_flow_cfg_set_pipe_queues(config, LANES));
	/* Without a quota counters fail or stay 0. */
	SET(doca_flow_cfg_set_nr_counters(config, COUNTERS));
	/* Not isolated: copies would not reach the queues. */
	SET(doca_flow_cfg_set_mode_args(config, "switch,hws"));
	SET(doca_flow_cfg_set_cb_entry_process(config, entry_done));
#if HAS_MIRROR
	/* Ids begin at 1, as 0 says that there is no mirror: the quota is the highest id + 1. */
	if (!session->flood)
		SET(doca_flow_cfg_set_nr_shared_resource(config, LANES + 1, DOCA_FLOW_SHARED_RESOURCE_MIRROR));
#endif
	SET(doca_flow_init(config));
	session->flow = error == DOCA_SUCCESS;
	doca_flow_cfg_destroy(config);
	if (error != DOCA_SUCCESS)
		return failed(error, "DOCA Flow does not start");
	return DPUFLOW_DOCA_OK;
}

static doca_error_t name_port(struct dpuflow_doca *session, unsigned int place, struct doca_flow_port_cfg *config)
{
	doca_error_t error = DOCA_SUCCESS;
#if PORT_NUMBER
	SET(doca_flow_port_cfg_set_port_id(config, session->number[place]));
#else
	char number[8];

	snprintf(number, sizeof(number), "%u", session->number[place]);
	SET(doca_flow_port_cfg_set_devargs(config, number));
#endif
#if REPRESENTOR_HANDLE
	if (place != UPLINK) {
		SET(doca_flow_port_cfg_set_dev_rep(config, session->representor[place]));
		return error;
	}
#else
	if (place != UPLINK)
		return error;
#endif
	SET(doca_flow_port_cfg_set_dev(config, session->device));
#if ACTION_MEMORY
	SET(doca_flow_port_cfg_set_actions_mem_size(config, ACTION_BYTES));
#endif
	return error;
}

int start_port(struct dpuflow_doca *session, unsigned int place)
{
	struct doca_flow_port_cfg *config;
	doca_error_t error = doca_flow_port_cfg_create(&config);

	if (error != DOCA_SUCCESS)
		return failed(error, "DOCA Flow has no room for a port's settings");
	SET(name_port(session, place, config));
	SET(doca_flow_port_start(config, &session->port[place]));
	doca_flow_port_cfg_destroy(config);
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
	struct doca_flow_pipe_cfg *config;
	doca_error_t error = doca_flow_pipe_cfg_create(&config, doca_flow_port_switch_get(session->port[UPLINK]));

	if (error != DOCA_SUCCESS)
		return failed(error, "DOCA Flow has no room for the settings of the pipe %s", plan->name);
	SET(doca_flow_pipe_cfg_set_name(config, plan->name));
	SET(doca_flow_pipe_cfg_set_type(config, plan->floods ? DOCA_FLOW_PIPE_HASH : DOCA_FLOW_PIPE_BASIC));
	SET(doca_flow_pipe_cfg_set_domain(config, DOCA_FLOW_PIPE_DOMAIN_DEFAULT));
	SET(doca_flow_pipe_cfg_set_is_root(config, plan->root));
	SET(doca_flow_pipe_cfg_set_nr_entries(config, plan->entries));
	SET(doca_flow_pipe_cfg_set_match(config, plan->match ? plan->match : &everything, plan->mask));
	if (plan->monitor)
		SET(doca_flow_pipe_cfg_set_monitor(config, plan->monitor));
#if HAS_FLOODING
	if (plan->floods)
		SET(doca_flow_pipe_cfg_set_hash_map_algorithm(config, DOCA_FLOW_PIPE_HASH_MAP_ALGORITHM_FLOODING));
#endif
	SET(doca_flow_pipe_create(config, plan->forward, plan->miss, pipe));
	doca_flow_pipe_cfg_destroy(config);
	if (error != DOCA_SUCCESS)
		return failed(error, "the pipe %s cannot be made", plan->name);
	return DPUFLOW_DOCA_OK;
}

#else
typedef int flow_opaque_is_empty;
#endif
