/* SPDX-License-Identifier: Apache-2.0 */
/* DOCA Flow itself: its states, what it refuses, and what its calls do to the card. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim.h"

#define NO(error, why) return sim_no(error, why)

struct doca_flow_port {
	bool used;
	int number;
	enum card_port port;
	struct doca_dev *device;
	struct doca_dev_rep *representor;
};

struct doca_flow_pipe {
	int place;
	uint32_t own[FIELDS]; /* fields that each entry brings itself */
	uint32_t entries;
	struct doca_flow_pipe *next;
};

struct doca_flow_pipe_entry {
	int place;
	struct doca_flow_pipe *pipe;
	void *context;
	bool pending, going;
	struct doca_flow_pipe_entry *next;
};

struct doca_flow_target {
	int kernel;
};

static struct settings flow;
static bool started;
static struct doca_flow_port ports[CARD_PORTS];
static struct doca_flow_pipe *pipes;
static struct doca_flow_pipe_entry *entries;
static uint32_t counters;

/* -- start and end ----------------------------------------------------------------------------- */

doca_error_t flow_start(const struct settings *settings)
{
	if (started)
		NO(DOCA_ERROR_BAD_STATE, "DOCA Flow has been started");
#if SIMULATED < 303
	if (!sim.eal)
		NO(DOCA_ERROR_BAD_STATE, "DPDK has not been started");
#endif
	if (!strstr(settings->mode, "switch") || !strstr(settings->mode, "hws"))
		NO(DOCA_ERROR_INVALID_VALUE, "switch and hws are needed here");
	if (!settings->queues || !settings->done)
		NO(DOCA_ERROR_INVALID_VALUE, "no queues, or no callback of entries");
	flow = *settings;
	sim.isolated = strstr(settings->mode, "isolated") != NULL;
	started = true;
	counters = 0;
	sim_made(KIND_FLOW);
	return DOCA_SUCCESS;
}

static void forget_entry(struct doca_flow_pipe_entry *entry)
{
	sim.card->entry[entry->place].used = sim.card->entry[entry->place].live = false;
	if (sim.card->entry[entry->place].counted)
		counters--;
	sim_gone(KIND_ENTRY);
	free(entry);
}

static void forget_pipe(struct doca_flow_pipe *pipe)
{
	struct doca_flow_pipe_entry **each = &entries;
	struct doca_flow_pipe **link = &pipes;

	card_lock(sim.card);
	if (sim.card->root == pipe->place)
		sim.card->root = CARD_NONE;
	sim.card->pipe[pipe->place].used = false;
	while (*each) {
		struct doca_flow_pipe_entry *entry = *each;

		if (entry->pipe != pipe) {
			each = &entry->next;
			continue;
		}
		*each = entry->next;
		forget_entry(entry);
	}
	card_unlock(sim.card);
	while (*link != pipe)
		link = &(*link)->next;
	*link = pipe->next;
	free(pipe);
	sim_gone(KIND_PIPE);
}

/* In the order they were made: with a root still there, production would go first. */
static void forget_pipes(void)
{
	while (pipes) {
		forget_pipe(pipes);
		card_lock(sim.card);
		sim_look("flushing the pipes");
		card_unlock(sim.card);
	}
}

void doca_flow_destroy(void)
{
	forget_pipes();
	for (int k = 0; k < CARD_PORTS; k++)
		if (ports[k].used)
			abort(); /* as it is undefined */
	if (started)
		sim_gone(KIND_FLOW);
	started = false;
}

static bool any_port_but(const struct doca_flow_port *port)
{
	for (int k = 0; k < CARD_PORTS; k++)
		if (ports[k].used && &ports[k] != port)
			return true;
	return false;
}

static doca_error_t own_card(void)
{
	int file;

	if (sim.card->nic_mode)
		NO(DOCA_ERROR_DRIVER, "Failed to get hws cap: this function does not own the steering");
	file = card_own(sim.path);
	if (file < 0)
		NO(DOCA_ERROR_DRIVER, "another process owns the card");
	sim.owner = file;
	card_lock(sim.card);
	card_reset(sim.card); /* what a dead one has left */
	sim.card->release = SIMULATED;
	sim.card->ready = true;
	card_unlock(sim.card);
	return DOCA_SUCCESS;
}

static doca_error_t find_port(const struct port_settings *settings, struct doca_flow_port *port)
{
	port->number = settings->number;
#if SIMULATED >= 300
	if (settings->number < 0)
		NO(DOCA_ERROR_INVALID_VALUE, "port ID is mandatory");
#endif
#if SIMULATED >= 301
	if (!settings->device == !settings->representor)
		NO(DOCA_ERROR_INVALID_VALUE, "either doca_dev or doca_dev_rep must be provided");
	port->port = settings->representor ? settings->representor->port : CARD_UPLINK;
#else
	port->port = ethdev_port(settings->number);
	if (port->port == CARD_UPLINK && !settings->device)
		NO(DOCA_ERROR_INVALID_VALUE, "the uplink's port needs its device");
#endif
#if SIMULATED < 303
	if (!ethdev_started(settings->number))
		NO(DOCA_ERROR_NOT_FOUND, "doca_dpdk_port_as_dev: its ethdev has not been started");
	if (ethdev_port(settings->number) != port->port)
		NO(DOCA_ERROR_INVALID_VALUE, "the ethdev of that number is another port");
#endif
	port->device = settings->device;
	port->representor = settings->representor;
	return DOCA_SUCCESS;
}

doca_error_t port_start(const struct port_settings *settings, struct doca_flow_port **made)
{
	struct doca_flow_port port = {0};
	doca_error_t error = find_port(settings, &port);

	if (error != DOCA_SUCCESS)
		return error;
	if (!started)
		NO(DOCA_ERROR_BAD_STATE, "DOCA Flow has not been started");
	if (settings->action_bytes &&
	    (settings->action_bytes & (settings->action_bytes - 1) || settings->action_bytes < 64))
		NO(DOCA_ERROR_INVALID_VALUE, "action memory is a power of two, 64 at least");
	if (ports[port.port].used)
		NO(DOCA_ERROR_IN_USE, "the port has been started");
	if (port.port != CARD_UPLINK && !ports[CARD_UPLINK].used)
		NO(DOCA_ERROR_BAD_STATE, "failed getting is_switch_manager property - proxy port 0 not found");
	for (int k = 0; k < CARD_PORTS; k++)
		if (ports[k].used && ports[k].number == port.number)
			NO(DOCA_ERROR_INVALID_VALUE, "that number has another port");
	if (port.port == CARD_UPLINK) {
		error = own_card();
		if (error != DOCA_SUCCESS)
			return error;
	}
	port.used = true;
	ports[port.port] = port;
	if (port.device)
		port.device->users++;
	if (port.representor)
		port.representor->users++;
	sim_made(KIND_PORT);
	*made = &ports[port.port];
	return DOCA_SUCCESS;
}

doca_error_t doca_flow_port_stop(struct doca_flow_port *port)
{
	bool first = sim_call(__func__);

	if (!port->used)
		NO(DOCA_ERROR_BAD_STATE, "the port is not started");
	if (port->port == CARD_UPLINK && any_port_but(port))
		NO(DOCA_ERROR_IN_USE, "the proxy port stops last");
	if (port->port == CARD_UPLINK) {
		forget_pipes();
		card_lock(sim.card);
		card_reset(sim.card);
		card_unlock(sim.card);
		close(sim.owner);
		sim.owner = 0;
	}
	if (port->device)
		port->device->users--;
	if (port->representor)
		port->representor->users--;
	memset(port, 0, sizeof(*port));
	sim_gone(KIND_PORT);
	return first ? DOCA_ERROR_DRIVER : DOCA_SUCCESS; /* an error of stopping does not keep it running */
}

void doca_flow_port_pipes_flush(struct doca_flow_port *port)
{
	sim_call(__func__);
	if (port->port == CARD_UPLINK)
		forget_pipes();
}

struct doca_flow_port *doca_flow_port_switch_get(const struct doca_flow_port *port)
{
	(void)port;
	return ports[CARD_UPLINK].used ? &ports[CARD_UPLINK] : NULL;
}

doca_error_t doca_flow_get_target(enum doca_flow_target_type type, struct doca_flow_target **target)
{
	static struct doca_flow_target kernel;

	CALL();
	if (type != DOCA_FLOW_TARGET_KERNEL || !started)
		NO(DOCA_ERROR_INVALID_VALUE, "there is the kernel's target, once DOCA Flow is started");
	*target = &kernel;
	return DOCA_SUCCESS;
}

/* -- where packets go -------------------------------------------------------------------------- */

static bool port_of(unsigned int number, struct way *way)
{
	for (int k = 0; k < CARD_PORTS; k++) {
		if (ports[k].used && ports[k].number == (int)number) {
			way->kind = WAY_PORT;
			way->place = ports[k].port;
			return true;
		}
	}
	return false;
}

static doca_error_t read_queue(const struct doca_flow_fwd *fwd, struct way *way)
{
#if SIMULATED >= 209
	uint32_t flags = fwd->rss.outer_flags;
	uint16_t *queues = fwd->rss.queues_array;
	int count = fwd->rss.nr_queues;
#else
	uint32_t flags = fwd->rss_outer_flags;
	uint16_t *queues = fwd->rss_queues;
	int count = fwd->num_of_queues;
#endif
	if (sim.isolated)
		NO(DOCA_ERROR_DRIVER, "an isolated port has no queues for the eSwitch");
	if (count != 1 || !queues)
		NO(DOCA_ERROR_NOT_SUPPORTED, "one queue is simulated");
	if (!flags)
		NO(DOCA_ERROR_INVALID_VALUE, "no RSS flags");
#if SIMULATED >= 301
	if ((flags & (DOCA_FLOW_RSS_IPV4 | DOCA_FLOW_RSS_IPV6)) == (DOCA_FLOW_RSS_IPV4 | DOCA_FLOW_RSS_IPV6))
		NO(DOCA_ERROR_INVALID_VALUE, "IPv4 and IPv6 may not share an RSS configuration");
#endif
	if (!queue_there(queues[0]))
		NO(DOCA_ERROR_NOT_FOUND, "there is no such receive queue");
	way->kind = WAY_QUEUE;
	way->place = queues[0];
	return DOCA_SUCCESS;
}

/* `own`: WAY_OWN where each entry brings its own. */
static doca_error_t read_way(const struct doca_flow_fwd *fwd, struct way *way, bool own)
{
	memset(way, 0, sizeof(*way));
	if (!fwd)
		return DOCA_SUCCESS;
	switch ((int)fwd->type) {
	case DOCA_FLOW_FWD_NONE:
		return DOCA_SUCCESS;
	case DOCA_FLOW_FWD_RSS:
		return read_queue(fwd, way);
	case DOCA_FLOW_FWD_PORT:
		if (own && fwd->port_id == 0xffff) {
			way->kind = WAY_OWN;
			return DOCA_SUCCESS;
		}
		if (!port_of(fwd->port_id, way))
			NO(DOCA_ERROR_INVALID_VALUE, "no port of that number is started");
		return DOCA_SUCCESS;
	case DOCA_FLOW_FWD_PIPE:
		way->kind = own && !fwd->next_pipe ? WAY_OWN : WAY_PIPE;
		if (way->kind == WAY_PIPE && !fwd->next_pipe)
			NO(DOCA_ERROR_INVALID_VALUE, "no pipe is named");
		if (fwd->next_pipe)
			way->place = fwd->next_pipe->place;
		return DOCA_SUCCESS;
	case DOCA_FLOW_FWD_DROP:
		way->kind = WAY_DROP;
		return DOCA_SUCCESS;
	case DOCA_FLOW_FWD_TARGET:
		if (!fwd->target)
			NO(DOCA_ERROR_INVALID_VALUE, "no target is named");
		way->kind = WAY_KERNEL;
		return DOCA_SUCCESS;
#if SIMULATED >= 301
	case DOCA_FLOW_FWD_HASH_PIPE:
		if (!fwd->hash_pipe.pipe || !sim.card->pipe[fwd->hash_pipe.pipe->place].floods ||
		    fwd->hash_pipe.algorithm != DOCA_FLOW_PIPE_HASH_MAP_ALGORITHM_FLOODING)
			NO(DOCA_ERROR_INVALID_VALUE, "no pipe of that algorithm is named");
		way->kind = WAY_PIPE;
		way->place = fwd->hash_pipe.pipe->place;
		return DOCA_SUCCESS;
#endif
	default:
		NO(DOCA_ERROR_NOT_SUPPORTED, "this forward is not simulated");
	}
}

/* -- mirrors ----------------------------------------------------------------------------------- */

#if SIMULATED < 302
#if SIMULATED < 209
doca_error_t doca_flow_shared_resource_cfg(enum doca_flow_shared_resource_type type, uint32_t id,
					   struct doca_flow_shared_resource_cfg *cfg)
#else
doca_error_t doca_flow_shared_resource_set_cfg(enum doca_flow_shared_resource_type type, uint32_t id,
					       struct doca_flow_shared_resource_cfg *cfg)
#endif
{
	struct card_mirror mirror = {.configured = true, .targets = cfg->mirror_cfg.nr_targets};
	doca_error_t error;

	CALL();
	if (type != DOCA_FLOW_SHARED_RESOURCE_MIRROR)
		NO(DOCA_ERROR_NOT_SUPPORTED, "of shared resources the mirror alone is simulated");
	if (!id || id >= flow.mirrors || id >= CARD_MIRRORS)
		NO(DOCA_ERROR_INVALID_VALUE, "no mirror of that number is reserved, and 0 is none");
	if (mirror.targets < 1 || mirror.targets > CARD_TARGETS)
		NO(DOCA_ERROR_INVALID_VALUE, "a mirror has one to four targets");
	for (uint32_t k = 0; k < mirror.targets; k++) {
		error = read_way(&cfg->mirror_cfg.target[k].fwd, &mirror.target[k], false);
		if (error != DOCA_SUCCESS)
			return error;
	}
	error = read_way(&cfg->mirror_cfg.fwd, &mirror.forward, false);
	if (error != DOCA_SUCCESS)
		return error;
	sim.card->mirror[id] = mirror;
	return DOCA_SUCCESS;
}

doca_error_t doca_flow_shared_resources_bind(enum doca_flow_shared_resource_type type, uint32_t *ids, uint32_t count,
					     void *port_or_pipe)
{
	(void)type;
	CALL();
	if (port_or_pipe != &ports[CARD_UPLINK])
		NO(DOCA_ERROR_NOT_SUPPORTED, "binding to the switch's port is simulated");
	for (uint32_t k = 0; k < count; k++) {
		struct card_mirror *mirror = &sim.card->mirror[ids[k]];

		if (ids[k] >= CARD_MIRRORS || !mirror->configured)
			NO(DOCA_ERROR_BAD_STATE, "the mirror is not configured");
		for (uint32_t target = 0; target < mirror->targets; target++)
			if (mirror->target[target].kind != WAY_PIPE && mirror->target[target].kind != WAY_PORT)
				NO(DOCA_ERROR_DRIVER, "Invalid mirror list format");
		if (SIMULATED >= 209 && mirror->forward.kind != WAY_NONE)
			NO(DOCA_ERROR_DRIVER, "Failed to create HWS mirror action, syndrome 0x6d3a25");
		mirror->bound = true;
	}
	return DOCA_SUCCESS;
}
#endif

static doca_error_t read_mirror(const struct doca_flow_monitor *monitor, uint32_t *id)
{
	*id = 0;
#if SIMULATED < 302
	if (!monitor || !monitor->shared_mirror_id)
		return DOCA_SUCCESS;
	*id = monitor->shared_mirror_id;
	if (*id >= CARD_MIRRORS || !sim.card->mirror[*id].bound)
		NO(DOCA_ERROR_BAD_STATE, "the mirror is not bound");
#else
	(void)monitor;
#endif
	return DOCA_SUCCESS;
}

/* -- pipes ------------------------------------------------------------------------------------- */

static doca_error_t check_pipe(const struct pipe_settings *settings, const struct way *forward,
			       const struct way *miss)
{
	bool hash = settings->type == DOCA_FLOW_PIPE_HASH;

	if (!started || settings->port != &ports[CARD_UPLINK] || !ports[CARD_UPLINK].used)
		NO(DOCA_ERROR_BAD_STATE, "pipes are made on the switch's port, once it runs");
	if (settings->type != DOCA_FLOW_PIPE_BASIC && !hash)
		NO(DOCA_ERROR_NOT_SUPPORTED, "this type of pipe is not simulated");
	if (settings->root && sim.card->root != CARD_NONE)
		NO(DOCA_ERROR_IN_USE, "the port has a root pipe");
	if (settings->root && hash)
		NO(DOCA_ERROR_NOT_SUPPORTED, "a hash pipe cannot be the root");
	if (!settings->entries)
		NO(DOCA_ERROR_INVALID_VALUE, "a pipe has one entry at least");
	if (hash && (settings->entries & (settings->entries - 1)))
		NO(DOCA_ERROR_INVALID_VALUE, "a hash pipe's entries are a power of two");
#if SIMULATED >= 301
	if (hash && settings->algorithms != DOCA_FLOW_PIPE_HASH_MAP_ALGORITHM_FLOODING)
		NO(DOCA_ERROR_NOT_SUPPORTED, "flooding is simulated");
	if (hash && settings->entries > 254)
		NO(DOCA_ERROR_INVALID_VALUE, "254 ways at most are flooded");
	if (hash && forward->kind != WAY_OWN && forward->kind != WAY_PIPE)
		NO(DOCA_ERROR_NOT_SUPPORTED, "flooding to pipes is simulated");
#else
	if (hash)
		NO(DOCA_ERROR_NOT_SUPPORTED, "flooding came with 3.1");
#endif
	if (forward->kind == WAY_NONE)
		NO(DOCA_ERROR_INVALID_VALUE, "no forward");
	if (miss->kind != WAY_NONE && miss->kind != WAY_PIPE && miss->kind != WAY_DROP && miss->kind != WAY_KERNEL)
		NO(DOCA_ERROR_INVALID_VALUE, "what is missed goes to a pipe, to the kernel or away");
	return DOCA_SUCCESS;
}

doca_error_t pipe_create(const struct pipe_settings *settings, const struct doca_flow_fwd *fwd,
			 const struct doca_flow_fwd *fwd_miss, struct doca_flow_pipe **made)
{
	struct card_pipe pipe = {.used = true, .root = settings->root, .room = settings->entries};
	struct doca_flow_pipe *handle, **last = &pipes;
	uint32_t own[FIELDS] = {0};
	doca_error_t error;
	int place = 0;

	error = read_way(fwd, &pipe.forward, true);
	if (error == DOCA_SUCCESS)
		error = read_way(fwd_miss, &pipe.miss, false);
	if (error == DOCA_SUCCESS)
		error = check_pipe(settings, &pipe.forward, &pipe.miss);
	if (error == DOCA_SUCCESS && settings->monitored)
		error = read_mirror(&settings->monitor, &pipe.mirror);
	if (error == DOCA_SUCCESS && settings->matched)
		error = read_match(&settings->match, settings->masked ? &settings->mask : NULL, &pipe.match, own);
	if (error != DOCA_SUCCESS)
		return error;
	pipe.floods = settings->type == DOCA_FLOW_PIPE_HASH;
	pipe.counted = settings->monitored && settings->monitor.counter_type == DOCA_FLOW_RESOURCE_TYPE_NON_SHARED;
	while (place < CARD_PIPES && sim.card->pipe[place].used)
		place++;
	if (place == CARD_PIPES)
		NO(DOCA_ERROR_FULL, "the card has no room for more pipes");
	card_lock(sim.card);
	sim.card->pipe[place] = pipe;
	if (settings->root)
		sim.card->root = place;
	card_unlock(sim.card);
	handle = calloc(1, sizeof(*handle));
	handle->place = place;
	memcpy(handle->own, own, sizeof(own));
	while (*last)
		last = &(*last)->next;
	*last = handle;
	*made = handle;
	sim_made(KIND_PIPE);
	return DOCA_SUCCESS;
}

void doca_flow_pipe_destroy(struct doca_flow_pipe *pipe)
{
	sim_call(__func__);
	forget_pipe(pipe);
}

/* -- entries ----------------------------------------------------------------------------------- */

static doca_error_t check_flags(uint16_t queue, uint32_t flags)
{
#if SIMULATED >= 303
	if (flags != DOCA_FLOW_ENTRY_FLAGS_NO_WAIT && flags != DOCA_FLOW_ENTRY_FLAGS_WAIT_FOR_BATCH)
		NO(DOCA_ERROR_INVALID_VALUE, "the flags are 1 or 2");
#else
	if (flags > DOCA_FLOW_WAIT_FOR_BATCH)
		NO(DOCA_ERROR_INVALID_VALUE, "the flags are 0 or 1");
#endif
	if (queue >= flow.queues)
		NO(DOCA_ERROR_INVALID_VALUE, "there is no such queue of pipes");
	return DOCA_SUCCESS;
}

static doca_error_t check_entry(const struct doca_flow_pipe *pipe, uint16_t queue, uint32_t flags, bool hash)
{
	doca_error_t error = check_flags(queue, flags);

	if (error != DOCA_SUCCESS)
		return error;
	if (sim.card->pipe[pipe->place].floods != hash)
		NO(DOCA_ERROR_INVALID_VALUE, "the pipe is of another type");
	if (pipe->entries == sim.card->pipe[pipe->place].room)
		NO(DOCA_ERROR_FULL, "the pipe is full");
	return DOCA_SUCCESS;
}

static doca_error_t add(struct doca_flow_pipe *pipe, struct card_entry *entry,
			const struct doca_flow_monitor *monitor, const struct doca_flow_fwd *fwd, void *context,
			struct doca_flow_pipe_entry **made)
{
	const struct card_pipe *of = &sim.card->pipe[pipe->place];
	struct doca_flow_pipe_entry *handle, **last = &entries;
	doca_error_t error = read_way(fwd, &entry->forward, false);
	int place = 0;

	if (error == DOCA_SUCCESS)
		error = read_mirror(monitor, &entry->mirror);
	if (error != DOCA_SUCCESS)
		return error;
	if (of->forward.kind == WAY_OWN && entry->forward.kind == WAY_NONE)
		NO(DOCA_ERROR_INVALID_VALUE, "the entry must bring its own forward");
	if (of->forward.kind != WAY_OWN && entry->forward.kind != WAY_NONE)
		NO(DOCA_ERROR_INVALID_VALUE, "the pipe's forward is not changeable");
	entry->counted = of->counted || (monitor && monitor->counter_type == DOCA_FLOW_RESOURCE_TYPE_NON_SHARED);
	if (entry->counted && counters == flow.counters)
		NO(DOCA_ERROR_NO_MEMORY, "the quota of counters is used up");
	while (place < CARD_ENTRIES && sim.card->entry[place].used)
		place++;
	if (place == CARD_ENTRIES)
		NO(DOCA_ERROR_FULL, "the card has no room for more entries");
	counters += entry->counted;
	entry->used = true;
	entry->pipe = pipe->place;
	sim.card->entry[place] = *entry;
	handle = calloc(1, sizeof(*handle));
	handle->place = place;
	handle->pipe = pipe;
	handle->context = context;
	handle->pending = true;
	while (*last)
		last = &(*last)->next;
	*last = handle;
	*made = handle;
	pipe->entries++;
	sim_made(KIND_ENTRY);
	return DOCA_SUCCESS;
}

static doca_error_t add_basic(uint16_t queue, struct doca_flow_pipe *pipe, const struct doca_flow_match *match,
			      const struct doca_flow_monitor *monitor, const struct doca_flow_fwd *fwd,
			      uint32_t flags, void *context, struct doca_flow_pipe_entry **made)
{
	const struct card_match *template = &sim.card->pipe[pipe->place].match;
	struct card_entry entry = {0};
	struct card_match read;
	doca_error_t error = check_entry(pipe, queue, flags, false);

	if (error == DOCA_SUCCESS)
		error = read_match(match, NULL, &read, NULL);
	if (error != DOCA_SUCCESS)
		return error;
	/* The pipe says which fields and under which mask, the entry the values of those that it brings itself. */
	entry.match = *template;
	for (int k = 0; k < FIELDS; k++)
		if (pipe->own[k])
			entry.match.value[k] = read.value[k];
	if (entry.match.mask[FIELD_PORT]) {
		struct way from;

		if (!port_of(entry.match.value[FIELD_PORT], &from))
			NO(DOCA_ERROR_INVALID_VALUE, "no port of that number is started");
		entry.match.value[FIELD_PORT] = from.place;
	}
	return add(pipe, &entry, monitor, fwd, context, made);
}

#if SIMULATED >= 303
doca_error_t doca_flow_pipe_basic_add_entry(uint16_t queue, struct doca_flow_pipe *pipe,
					    const struct doca_flow_match *match, uint8_t action_idx,
					    const struct doca_flow_actions *actions,
					    const struct doca_flow_monitor *monitor, const struct doca_flow_fwd *fwd,
					    uint32_t flags, void *context, struct doca_flow_pipe_entry **entry)
{
	CALL();
	if (action_idx || actions)
		NO(DOCA_ERROR_NOT_SUPPORTED, "actions are not simulated");
	return add_basic(queue, pipe, match, monitor, fwd, flags, context, entry);
}
#elif SIMULATED >= 302
doca_error_t doca_flow_pipe_add_entry(uint16_t queue, struct doca_flow_pipe *pipe,
				      const struct doca_flow_match *match, uint8_t action_idx,
				      const struct doca_flow_actions *actions,
				      const struct doca_flow_monitor *monitor, const struct doca_flow_fwd *fwd,
				      uint32_t flags, void *context, struct doca_flow_pipe_entry **entry)
{
	CALL();
	if (action_idx || actions)
		NO(DOCA_ERROR_NOT_SUPPORTED, "actions are not simulated");
	return add_basic(queue, pipe, match, monitor, fwd, flags, context, entry);
}
#else
doca_error_t doca_flow_pipe_add_entry(uint16_t queue, struct doca_flow_pipe *pipe,
				      const struct doca_flow_match *match, const struct doca_flow_actions *actions,
				      const struct doca_flow_monitor *monitor, const struct doca_flow_fwd *fwd,
				      uint32_t flags, void *context, struct doca_flow_pipe_entry **entry)
{
	CALL();
	if (actions)
		NO(DOCA_ERROR_NOT_SUPPORTED, "actions are not simulated");
	return add_basic(queue, pipe, match, monitor, fwd, flags, context, entry);
}
#endif

static doca_error_t add_hash(uint16_t queue, struct doca_flow_pipe *pipe, uint32_t index,
			     const struct doca_flow_monitor *monitor, const struct doca_flow_fwd *fwd, uint32_t flags,
			     void *context, struct doca_flow_pipe_entry **made)
{
	struct card_entry entry = {.index = index};
	doca_error_t error = check_entry(pipe, queue, flags, true);

	if (error != DOCA_SUCCESS)
		return error;
	if (index >= sim.card->pipe[pipe->place].room)
		NO(DOCA_ERROR_INVALID_VALUE, "there is no entry of that number");
	return add(pipe, &entry, monitor, fwd, context, made);
}

#if SIMULATED >= 302
doca_error_t doca_flow_pipe_hash_add_entry(uint16_t queue, struct doca_flow_pipe *pipe, uint32_t entry_index,
					   uint8_t action_idx, const struct doca_flow_actions *actions,
					   const struct doca_flow_monitor *monitor, const struct doca_flow_fwd *fwd,
					   uint32_t flags, void *context, struct doca_flow_pipe_entry **entry)
{
	CALL();
	if (action_idx || actions)
		NO(DOCA_ERROR_NOT_SUPPORTED, "actions are not simulated");
	return add_hash(queue, pipe, entry_index, monitor, fwd, flags, context, entry);
}
#else
doca_error_t doca_flow_pipe_hash_add_entry(uint16_t queue, struct doca_flow_pipe *pipe, uint32_t entry_index,
					   const struct doca_flow_actions *actions,
					   const struct doca_flow_monitor *monitor, const struct doca_flow_fwd *fwd,
					   enum doca_flow_flags_type flags, void *context,
					   struct doca_flow_pipe_entry **entry)
{
	CALL();
	if (actions)
		NO(DOCA_ERROR_NOT_SUPPORTED, "actions are not simulated");
	return add_hash(queue, pipe, entry_index, monitor, fwd, flags, context, entry);
}
#endif

#if SIMULATED < 209
doca_error_t doca_flow_pipe_rm_entry(uint16_t queue, uint32_t flags, struct doca_flow_pipe_entry *entry)
#else
doca_error_t doca_flow_pipe_remove_entry(uint16_t queue, uint32_t flags, struct doca_flow_pipe_entry *entry)
#endif
{
	doca_error_t error;

	CALL();
	error = check_flags(queue, flags);
	if (error != DOCA_SUCCESS)
		return error;
	if (entry->pending)
		NO(DOCA_ERROR_BAD_STATE, "the entry is not in the card yet, or is removed already");
	entry->pending = entry->going = true;
	return DOCA_SUCCESS;
}

/* Entries that were added or removed take effect here, and their callbacks are called. */
doca_error_t doca_flow_entries_process(struct doca_flow_port *port, uint16_t queue, uint64_t timeout_us,
				       uint32_t most)
{
	struct doca_flow_pipe_entry **link = &entries;
	uint32_t done = 0;

	(void)port;
	(void)timeout_us;
	CALL();
	while (*link && (!most || done < most)) {
		struct doca_flow_pipe_entry *entry = *link;

		if (!entry->pending) {
			link = &entry->next;
			continue;
		}
		entry->pending = false;
		card_lock(sim.card);
		sim.card->entry[entry->place].live = !entry->going;
		card_unlock(sim.card);
		flow.done(entry, queue, DOCA_FLOW_ENTRY_STATUS_SUCCESS,
			  entry->going ? DOCA_FLOW_ENTRY_OP_DEL : DOCA_FLOW_ENTRY_OP_ADD, entry->context);
		done++;
		if (!entry->going) {
			link = &entry->next;
			continue;
		}
		*link = entry->next;
		entry->pipe->entries--;
		forget_entry(entry);
	}
	return DOCA_SUCCESS;
}

#if SIMULATED < 209
doca_error_t doca_flow_query_entry(struct doca_flow_pipe_entry *entry, struct doca_flow_query *query)
#else
doca_error_t doca_flow_resource_query_entry(struct doca_flow_pipe_entry *entry,
					    struct doca_flow_resource_query *query)
#endif
{
	const struct card_entry *found = &sim.card->entry[entry->place];

	CALL();
	if (!found->counted)
		NO(DOCA_ERROR_INVALID_VALUE, "the entry has no counter");
#if SIMULATED < 209
	query->total_pkts = found->packets;
	query->total_bytes = found->bytes;
#else
	query->counter.total_pkts = found->packets;
	query->counter.total_bytes = found->bytes;
#endif
	return DOCA_SUCCESS;
}
