/* SPDX-License-Identifier: Apache-2.0 */
/* The settings of DOCA Flow, ports and pipes: plain structs up to 2.6, objects with setters from 2.7. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#if SIMULATED < 207

doca_error_t doca_flow_init(const struct doca_flow_cfg *cfg)
{
	struct settings settings = {.queues = cfg->queues, .counters = cfg->resource.nb_counters, .done = cfg->cb};

	CALL();
	snprintf(settings.mode, sizeof(settings.mode), "%s", cfg->mode_args);
	settings.mirrors = cfg->nr_shared_resources[DOCA_FLOW_SHARED_RESOURCE_MIRROR];
	return flow_start(&settings);
}

doca_error_t doca_flow_port_start(const struct doca_flow_port_cfg *cfg, struct doca_flow_port **port)
{
	struct port_settings settings = {.number = cfg->port_id, .device = cfg->dev};

	CALL();
	if (cfg->type != DOCA_FLOW_PORT_DPDK_BY_ID || !cfg->devargs || atoi(cfg->devargs) != cfg->port_id)
		return sim_no(DOCA_ERROR_INVALID_VALUE, "a port is named by its number, and in devargs");
	return port_start(&settings, port);
}

doca_error_t doca_flow_pipe_create(const struct doca_flow_pipe_cfg *cfg, const struct doca_flow_fwd *fwd,
				   const struct doca_flow_fwd *fwd_miss, struct doca_flow_pipe **pipe)
{
	struct pipe_settings settings = {.port = cfg->port, .type = cfg->attr.type, .root = cfg->attr.is_root};

	CALL();
	settings.entries = cfg->attr.nb_flows;
	settings.matched = cfg->match != NULL;
	settings.masked = cfg->match_mask != NULL;
	settings.monitored = cfg->monitor != NULL;
	if (settings.matched)
		settings.match = *cfg->match;
	if (settings.masked)
		settings.mask = *cfg->match_mask;
	if (settings.monitored)
		settings.monitor = *cfg->monitor;
	return pipe_create(&settings, fwd, fwd_miss, pipe);
}

#else

struct doca_flow_cfg {
	struct settings settings;
};

struct doca_flow_port_cfg {
	struct port_settings settings;
};

struct doca_flow_pipe_cfg {
	struct pipe_settings settings;
};

#define MAKE(kind, cfg)                                                                                              \
	do {                                                                                                         \
		CALL();                                                                                              \
		*(cfg) = calloc(1, sizeof(**(cfg)));                                                                 \
		sim_made(kind);                                                                                      \
	} while (0)

#define SET(statement)                                                                                               \
	do {                                                                                                         \
		CALL();                                                                                              \
		statement;                                                                                           \
		return DOCA_SUCCESS;                                                                                 \
	} while (0)

doca_error_t doca_flow_cfg_create(struct doca_flow_cfg **cfg)
{
	MAKE(KIND_FLOW_CFG, cfg);
	(*cfg)->settings.queues = 1;
	return DOCA_SUCCESS;
}

doca_error_t doca_flow_cfg_destroy(struct doca_flow_cfg *cfg)
{
	free(cfg);
	sim_gone(KIND_FLOW_CFG);
	return DOCA_SUCCESS;
}

doca_error_t doca_flow_cfg_set_pipe_queues(struct doca_flow_cfg *cfg, uint16_t queues)
{
	SET(cfg->settings.queues = queues);
}

doca_error_t doca_flow_cfg_set_nr_counters(struct doca_flow_cfg *cfg, uint32_t counters)
{
	SET(cfg->settings.counters = counters);
}

doca_error_t doca_flow_cfg_set_mode_args(struct doca_flow_cfg *cfg, const char *mode)
{
	SET(snprintf(cfg->settings.mode, sizeof(cfg->settings.mode), "%s", mode));
}

doca_error_t doca_flow_cfg_set_cb_entry_process(struct doca_flow_cfg *cfg, doca_flow_entry_process_cb cb)
{
	SET(cfg->settings.done = cb);
}

#if SIMULATED < 302
doca_error_t doca_flow_cfg_set_nr_shared_resource(struct doca_flow_cfg *cfg, uint32_t count,
						  enum doca_flow_shared_resource_type type)
{
	if (type != DOCA_FLOW_SHARED_RESOURCE_MIRROR)
		return sim_no(DOCA_ERROR_NOT_SUPPORTED, "of shared resources the mirror alone is simulated");
	SET(cfg->settings.mirrors = count);
}
#endif

doca_error_t doca_flow_init(struct doca_flow_cfg *cfg)
{
	CALL();
	return flow_start(&cfg->settings);
}

doca_error_t doca_flow_port_cfg_create(struct doca_flow_port_cfg **cfg)
{
	MAKE(KIND_PORT_CFG, cfg);
	(*cfg)->settings.number = -1;
	return DOCA_SUCCESS;
}

doca_error_t doca_flow_port_cfg_destroy(struct doca_flow_port_cfg *cfg)
{
	free(cfg);
	sim_gone(KIND_PORT_CFG);
	return DOCA_SUCCESS;
}

doca_error_t doca_flow_port_cfg_set_devargs(struct doca_flow_port_cfg *cfg, const char *arguments)
{
#if SIMULATED >= 300
	(void)cfg;
	(void)arguments;
	CALL();
	return sim_no(DOCA_ERROR_NOT_SUPPORTED, "a port's number is no string any more");
#else
	SET(cfg->settings.number = atoi(arguments));
#endif
}

#if SIMULATED >= 303
doca_error_t doca_flow_port_cfg_set_dev(struct doca_flow_port_cfg *cfg, struct doca_dev *dev)
#else
doca_error_t doca_flow_port_cfg_set_dev(struct doca_flow_port_cfg *cfg, void *dev)
#endif
{
	SET(cfg->settings.device = dev);
}

#if SIMULATED >= 210
doca_error_t doca_flow_port_cfg_set_actions_mem_size(struct doca_flow_port_cfg *cfg, uint32_t bytes)
{
	SET(cfg->settings.action_bytes = bytes);
}
#endif

#if SIMULATED >= 300
doca_error_t doca_flow_port_cfg_set_port_id(struct doca_flow_port_cfg *cfg, uint16_t port)
{
	SET(cfg->settings.number = port);
}
#endif

#if SIMULATED >= 301
doca_error_t doca_flow_port_cfg_set_dev_rep(struct doca_flow_port_cfg *cfg, struct doca_dev_rep *rep)
{
	SET(cfg->settings.representor = rep);
}
#endif

doca_error_t doca_flow_port_start(const struct doca_flow_port_cfg *cfg, struct doca_flow_port **port)
{
	CALL();
	return port_start(&cfg->settings, port);
}

doca_error_t doca_flow_pipe_cfg_create(struct doca_flow_pipe_cfg **cfg, struct doca_flow_port *port)
{
	MAKE(KIND_PIPE_CFG, cfg);
	(*cfg)->settings.port = port;
	(*cfg)->settings.entries = 8192;
	return DOCA_SUCCESS;
}

doca_error_t doca_flow_pipe_cfg_destroy(struct doca_flow_pipe_cfg *cfg)
{
	free(cfg);
	sim_gone(KIND_PIPE_CFG);
	return DOCA_SUCCESS;
}

doca_error_t doca_flow_pipe_cfg_set_name(struct doca_flow_pipe_cfg *cfg, const char *name)
{
	SET((void)cfg; (void)name);
}

doca_error_t doca_flow_pipe_cfg_set_type(struct doca_flow_pipe_cfg *cfg, enum doca_flow_pipe_type type)
{
	SET(cfg->settings.type = type);
}

doca_error_t doca_flow_pipe_cfg_set_domain(struct doca_flow_pipe_cfg *cfg, enum doca_flow_pipe_domain domain)
{
	(void)cfg;
	if (domain != DOCA_FLOW_PIPE_DOMAIN_DEFAULT)
		return sim_no(DOCA_ERROR_NOT_SUPPORTED, "the default domain alone is simulated");
	SET((void)domain);
}

doca_error_t doca_flow_pipe_cfg_set_is_root(struct doca_flow_pipe_cfg *cfg, bool root)
{
	SET(cfg->settings.root = root);
}

doca_error_t doca_flow_pipe_cfg_set_nr_entries(struct doca_flow_pipe_cfg *cfg, uint32_t entries)
{
	SET(cfg->settings.entries = entries);
}

doca_error_t doca_flow_pipe_cfg_set_match(struct doca_flow_pipe_cfg *cfg, const struct doca_flow_match *match,
					  const struct doca_flow_match *mask)
{
	CALL();
	cfg->settings.matched = true;
	cfg->settings.match = *match;
	cfg->settings.masked = mask != NULL;
	if (mask)
		cfg->settings.mask = *mask;
	return DOCA_SUCCESS;
}

doca_error_t doca_flow_pipe_cfg_set_monitor(struct doca_flow_pipe_cfg *cfg, const struct doca_flow_monitor *monitor)
{
	CALL();
	cfg->settings.monitored = true;
	cfg->settings.monitor = *monitor;
	return DOCA_SUCCESS;
}

#if SIMULATED >= 301
doca_error_t doca_flow_pipe_cfg_set_hash_map_algorithm(struct doca_flow_pipe_cfg *cfg, uint32_t algorithms)
{
	SET(cfg->settings.algorithms = algorithms);
}
#endif

doca_error_t doca_flow_pipe_create(const struct doca_flow_pipe_cfg *cfg, const struct doca_flow_fwd *fwd,
				   const struct doca_flow_fwd *fwd_miss, struct doca_flow_pipe **pipe)
{
	CALL();
	return pipe_create(&cfg->settings, fwd, fwd_miss, pipe);
}

#endif
