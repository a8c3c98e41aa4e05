/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the real library refuses, the simulated one must refuse, too, or tests of the adapter would prove nothing.
 * refuse CARD: each case makes one mistake on an otherwise right set-up, and expects the error; where the real
 * library does not refuse but goes dark, so must the card.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "adapter.h"
#include "card.h"

static struct card *card;
static struct dpuflow_doca session;
static unsigned int wrong;

static void expect(const char *what, bool refused)
{
	printf("%s: %s\n", refused ? "refused" : "NOT REFUSED", what);
	wrong += !refused;
}

/* Device and queues, and with `flow` DOCA Flow and its ports. */
static void begin(bool flow)
{
	int status;

	memset(&session, 0, sizeof(session));
	session.options.frame = 9216;
	session.options.snaplen = 128;
	strcpy(session.options.device, "0000:03:00.0");
	strcpy(session.options.peer, "hpf");
	session.flood = HAS_FLOODING && !HAS_MIRROR;
	session.ports = 2;
	say_nothing();
	status = open_device(&session) || receive_open(&session);
	if (!status && flow)
		status = start_flow(&session) || start_port(&session, UPLINK) || start_port(&session, PEER);
	if (status) {
		printf("set-up failed: %s\n", dpuflow_doca_error());
		exit(2);
	}
}

static void end(void)
{
	for (unsigned int place = MAX_PORTS; place-- > 0;)
		if (session.port[place])
			doca_flow_port_stop(session.port[place]);
	if (session.flow)
		doca_flow_destroy();
	receive_close(&session);
	close_device(&session);
}

static struct doca_flow_pipe *pipe_to(const struct doca_flow_fwd *forward, const struct doca_flow_fwd *miss,
				      bool root)
{
	struct doca_flow_pipe *pipe = NULL;
	struct pipe_plan plan = {.name = "test", .root = root, .entries = 4, .forward = forward, .miss = miss};

	return make_pipe(&session, &plan, &pipe) ? NULL : pipe;
}

static struct doca_flow_fwd to_peer(void)
{
	struct doca_flow_fwd forward = {.type = DOCA_FLOW_FWD_PORT};

	forward.port_id = session.number[PEER];
	return forward;
}

static struct doca_flow_fwd to_queue(uint16_t *queue)
{
	struct doca_flow_fwd forward = {.type = DOCA_FLOW_FWD_RSS};

#if NESTED_RSS
	forward.rss_type = DOCA_FLOW_RESOURCE_TYPE_NON_SHARED;
	forward.rss.outer_flags = DOCA_FLOW_RSS_IPV4;
	forward.rss.queues_array = queue;
	forward.rss.nr_queues = 1;
#else
	forward.rss_outer_flags = DOCA_FLOW_RSS_IPV4;
	forward.rss_queues = queue;
	forward.num_of_queues = 1;
#endif
	return forward;
}

static void orders(void)
{
	struct doca_flow_fwd forward = {.type = DOCA_FLOW_FWD_DROP};

	begin(false);
	expect("a port before DOCA Flow", start_port(&session, UPLINK));
	say_nothing();
	start_flow(&session);
	expect("DOCA Flow twice", start_flow(&session));
	session.flow = true;
	expect("a pipe before its port", !pipe_to(&forward, NULL, false));
	expect("a representor before the uplink", start_port(&session, PEER));
	start_port(&session, UPLINK);
	start_port(&session, PEER);
	expect("a port twice", start_port(&session, PEER));
	expect("a device closed while its port runs", doca_dev_close(session.device) != DOCA_SUCCESS);
	expect("the uplink stopped before the others", doca_flow_port_stop(session.port[UPLINK]) != DOCA_SUCCESS);
	end();
}

static void pipes(void)
{
	struct doca_flow_fwd peer, none = {.type = DOCA_FLOW_FWD_NONE}, drop = {.type = DOCA_FLOW_FWD_DROP}, queue;
	struct doca_flow_match match = {0};
	struct doca_flow_pipe *pipe;
	uint16_t number = 3;

	begin(true);
	peer = to_peer();
	queue = to_queue(&number);
	expect("a pipe without a forward", !pipe_to(&none, NULL, false));
	expect("a queue that is not there", !pipe_to(&queue, NULL, false));
	number = 0;
	expect("a miss to a queue", !pipe_to(&peer, &queue, false));
	expect("a miss to a port", !pipe_to(&peer, &peer, false));
	pipe = pipe_to(&peer, &drop, false);
	expect("an entry's forward where the pipe has one",
	       add_entry(&session, "test", pipe, NULL, NULL, &drop, NULL));
	expect("an entry of a hash pipe in a basic one", add_flood_entry(&session, "test", pipe, 0, &peer));
	match.outer.eth.type = 0x0608;
	expect("a match that is not simulated", make_pass(&session, "test", &peer, &match, NULL, &pipe));
	pipe_to(&peer, &peer, true);
	peer.port_id = 99;
	expect("a port that is not there", !pipe_to(&peer, NULL, false));
	peer.port_id = session.number[PEER];
	pipe_to(&peer, &drop, true);
	expect("two roots", !pipe_to(&peer, &drop, true));
	card_lock(card);
	expect("production once a root takes it without an entry", card->root != CARD_NONE);
	card_unlock(card);
	card->dark = 0;
	end();
}

static void counted(void)
{
	struct doca_flow_monitor monitor = {0};
	struct doca_flow_fwd peer;
	struct doca_flow_pipe *pipe;
	int status = 0;
	struct pipe_plan plan = {.name = "test", .entries = COUNTERS + 1, .monitor = &monitor};

	begin(true);
	peer = to_peer();
	monitor.counter_type = DOCA_FLOW_RESOURCE_TYPE_NON_SHARED;
	plan.forward = &peer;
	make_pipe(&session, &plan, &pipe);
	for (unsigned int k = 0; k <= CARD_ENTRIES && !status; k++)
		status = add_entry(&session, "test", pipe, NULL, &monitor, NULL, NULL);
	expect("more entries than there is room for", status);
	end();
}

#if HAS_MIRROR
static doca_error_t configure(uint32_t id, const struct doca_flow_fwd *target, const struct doca_flow_fwd *original)
{
	struct doca_flow_mirror_target one;
	struct doca_flow_shared_resource_cfg config;

	memset(&one, 0, sizeof(one));
	memset(&config, 0, sizeof(config));
	one.fwd = *target;
	config.mirror_cfg.nr_targets = 1;
	config.mirror_cfg.target = &one;
	if (original)
		config.mirror_cfg.fwd = *original;
#if RENAMED_MIRROR_CONFIG
	return doca_flow_shared_resource_set_cfg(DOCA_FLOW_SHARED_RESOURCE_MIRROR, id, &config);
#else
	return doca_flow_shared_resource_cfg(DOCA_FLOW_SHARED_RESOURCE_MIRROR, id, &config);
#endif
}

static doca_error_t bind_mirror(uint32_t id)
{
	return doca_flow_shared_resources_bind(DOCA_FLOW_SHARED_RESOURCE_MIRROR, &id, 1, session.port[UPLINK]);
}

static void came_out(void *context, bool queue, unsigned int place, const uint8_t *packet, uint32_t length)
{
	(void)place;
	(void)packet;
	(void)length;
	*(unsigned int *)context += !queue;
}

static void mirrors(void)
{
	struct doca_flow_monitor monitor = {.shared_mirror_id = 1};
	struct doca_flow_fwd peer, queue, copy = {.type = DOCA_FLOW_FWD_PIPE}, drop = {.type = DOCA_FLOW_FWD_DROP};
	struct pipe_plan plan = {.name = "test", .root = true, .entries = 1, .monitor = &monitor, .miss = &drop};
	struct doca_flow_pipe *pipe;
	unsigned int count = 0;
	uint16_t number = 0;
	uint8_t packet[60] = {0};

	begin(true);
	peer = to_peer();
	queue = to_queue(&number);
	copy.next_pipe = pipe_to(&queue, NULL, false);
	plan.forward = &peer;
	expect("mirror 0", configure(0, &copy, NULL) != DOCA_SUCCESS);
	expect("a mirror beyond the quota", configure(LANES + 1, &copy, NULL) != DOCA_SUCCESS);
	expect("a mirror bound before it is configured", bind_mirror(1) != DOCA_SUCCESS);
	configure(1, &queue, MIRROR_FORWARDS ? &peer : NULL);
	expect("a queue as a mirror's target", bind_mirror(1) != DOCA_SUCCESS);
	configure(1, &copy, MIRROR_FORWARDS ? &peer : NULL);
	expect("a mirror used before it is bound", make_pipe(&session, &plan, &pipe));
#if MIRROR_FORWARDS
	/* The trap of 2.7: no error, and the original is dropped. */
	configure(1, &copy, NULL);
	bind_mirror(1);
	make_pipe(&session, &plan, &pipe);
	add_entry(&session, "test", pipe, NULL, NULL, NULL, NULL);
	card_forward(card, CARD_UPLINK, packet, sizeof(packet), 0, false, came_out, &count);
	expect("production, by a mirror whose forward is empty", !count);
#else
	(void)packet;
	(void)count;
	(void)came_out;
	configure(1, &copy, &peer);
	expect("a mirror with a forward of its own", bind_mirror(1) != DOCA_SUCCESS);
#endif
	card->dark = 0;
	end();
}
#else
static void mirrors(void)
{
}
#endif

#if HAS_FLOODING
static void floods(void)
{
	struct doca_flow_fwd each = {.type = DOCA_FLOW_FWD_PIPE}, drop = {.type = DOCA_FLOW_FWD_DROP};
	struct pipe_plan plan = {.name = "test", .floods = true, .forward = &each};
	struct doca_flow_pipe *pipe;

	begin(true);
	plan.entries = 3;
	expect("a hash pipe of three entries", make_pipe(&session, &plan, &pipe));
	plan.entries = 256;
	expect("a flood of 256", make_pipe(&session, &plan, &pipe));
	plan.entries = 2;
	plan.root = true;
	expect("a hash pipe as root", make_pipe(&session, &plan, &pipe));
	plan.root = false;
	plan.forward = &drop;
	expect("a flood that drops", make_pipe(&session, &plan, &pipe));
	plan.forward = &each;
	make_pipe(&session, &plan, &pipe);
	expect("an entry without its forward", add_flood_entry(&session, "test", pipe, 0, NULL));
	each.next_pipe = pipe_to(&drop, NULL, false);
	expect("entry 2 of two", add_flood_entry(&session, "test", pipe, 2, &each));
	end();
}
#else
static void floods(void)
{
}
#endif

#if OPAQUE_CONFIG
static void settings(void)
{
	struct doca_flow_port_cfg *port;
	struct doca_flow_cfg *flow;
	struct doca_flow_port *made;
	struct doca_flow_fwd queue, peer;
	struct doca_flow_monitor monitor = {0};
	struct pipe_plan plan = {.name = "test", .entries = 1, .monitor = &monitor, .forward = &peer};
	struct doca_flow_pipe *pipe;
	uint16_t number = 0;

	begin(false);
	doca_flow_cfg_create(&flow);
	doca_flow_cfg_set_cb_entry_process(flow, entry_done);
	doca_flow_cfg_set_mode_args(flow, "vnf,hws");
	expect("a mode that is no switch", doca_flow_init(flow) != DOCA_SUCCESS);
	doca_flow_cfg_set_mode_args(flow, "switch,hws,isolated");
	session.flow = doca_flow_init(flow) == DOCA_SUCCESS;
	doca_flow_cfg_destroy(flow);
	start_port(&session, UPLINK);
	queue = to_queue(&number);
	expect("a queue of an isolated port", !pipe_to(&queue, NULL, false));
	start_port(&session, PEER);
	peer = to_peer();
	monitor.counter_type = DOCA_FLOW_RESOURCE_TYPE_NON_SHARED;
	make_pipe(&session, &plan, &pipe);
	expect("a counter without a quota", add_entry(&session, "test", pipe, NULL, &monitor, NULL, NULL));
	end();

	begin(false);
	start_flow(&session);
	doca_flow_port_cfg_create(&port);
	doca_flow_port_cfg_set_dev(port, session.device);
#if PORT_NUMBER
	expect("a port without its number", doca_flow_port_start(port, &made) != DOCA_SUCCESS);
	doca_flow_port_cfg_set_port_id(port, session.number[UPLINK]);
	doca_flow_port_cfg_set_actions_mem_size(port, 100);
	expect("action memory of 100 bytes", doca_flow_port_start(port, &made) != DOCA_SUCCESS);
	expect("a port named by a string", doca_flow_port_cfg_set_devargs(port, "0") != DOCA_SUCCESS);
#else
	doca_flow_port_cfg_set_devargs(port, "9");
	expect("a port that DPDK does not have", doca_flow_port_start(port, &made) != DOCA_SUCCESS);
#endif
	doca_flow_port_cfg_destroy(port);
	end();
}
#else
static void settings(void)
{
}
#endif

int main(int count, char **words)
{
	if (count != 2)
		return 2;
	setenv("DPUFLOW_SIM_CARD", words[1], 1);
	card = card_open(words[1], true);
	if (!card)
		return 2;
	orders();
	pipes();
	counted();
	mirrors();
	floods();
	settings();
	for (int k = 0; k < CARD_KINDS; k++) {
		if (card->objects[k])
			printf("NOT GIVEN BACK: %d of kind %d\n", card->objects[k], k);
		wrong += card->objects[k] != 0;
	}
	return wrong != 0;
}
