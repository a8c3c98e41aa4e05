/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Production first: two passes, gates that lead to them, and the root. Only then what copies is made, whole before
 * anything leads to it, and last an entry in each gate that leads through it. What no entry of the root knows, the
 * kernel's own rules forward.
 *
 *   root -- from uplink --> gate -- closed ----------------------------------------> pass: peer
 *        |                     \-- open --> [1 of 2^k] -> RoCE, TCP? -- no ---------> pass: peer
 *        |                                                          \-- yes: flood, or mirror --> pass, copy
 *        |- from peer ----> the same: uplink
 *        \- else ---------> rest: the kernel
 */
#include <string.h>

#include "adapter.h"

static int to_kernel(struct doca_flow_fwd *forward)
{
	struct doca_flow_target *kernel;
	doca_error_t error = doca_flow_get_target(DOCA_FLOW_TARGET_KERNEL, &kernel);

	if (error != DOCA_SUCCESS)
		return failed(error, "packets that are not production cannot be left to the kernel");
	memset(forward, 0, sizeof(*forward));
	forward->type = DOCA_FLOW_FWD_TARGET;
	forward->target = kernel;
	return DPUFLOW_DOCA_OK;
}

/* A pipe with one entry and no choice. */
int make_pass(struct dpuflow_doca *session, const char *name, const struct doca_flow_fwd *forward,
	      const struct doca_flow_match *match, const struct doca_flow_fwd *miss, struct doca_flow_pipe **pipe)
{
	struct pipe_plan plan = {.name = name, .entries = 1, .match = match, .forward = forward, .miss = miss};

	if (make_pipe(session, &plan, pipe))
		return DPUFLOW_DOCA_FAILED;
	return add_entry(session, name, *pipe, match, NULL, NULL, NULL);
}

/* Copies to the lane's queue. IPv4 and IPv6 apart: from 3.1 they may not share what queues are chosen by. */
static int make_queue_copy(struct dpuflow_doca *session, struct lane *lane)
{
	uint16_t queue = lane->number;
	struct doca_flow_fwd to_six = {.type = DOCA_FLOW_FWD_PIPE}, drop = {.type = DOCA_FLOW_FWD_DROP};

	for (int six = 1; six >= 0; six--) {
		struct doca_flow_fwd forward = {.type = DOCA_FLOW_FWD_RSS};
		struct doca_flow_match match = {0};
		uint32_t flags = six ? DOCA_FLOW_RSS_IPV6 : DOCA_FLOW_RSS_IPV4;

#if NESTED_RSS
		forward.rss_type = DOCA_FLOW_RESOURCE_TYPE_NON_SHARED;
		forward.rss.outer_flags = flags;
		forward.rss.queues_array = &queue;
		forward.rss.nr_queues = 1;
#else
		forward.rss_outer_flags = flags;
		forward.rss_queues = &queue;
		forward.num_of_queues = 1;
#endif
		match_ip(&match, six);
		/* What is no IP is not copied; this drops the copy alone. */
		if (make_pass(session, six ? "copy IPv6" : "copy IPv4", &forward, &match, six ? &drop : &to_six,
			      &lane->copy))
			return DPUFLOW_DOCA_FAILED;
		to_six.next_pipe = lane->copy;
	}
	return DPUFLOW_DOCA_OK;
}

static int make_copy(struct dpuflow_doca *session, struct lane *lane)
{
	struct doca_flow_fwd forward = {.type = DOCA_FLOW_FWD_PORT};

	if (!session->options.copy_to[0])
		return make_queue_copy(session, lane);
	forward.port_id = session->number[COPIES];
	return make_pass(session, "copy to port", &forward, NULL, NULL, &lane->copy);
}

/* A pipe that chooses by `match`; what it leaves goes on to lane->head, before which it puts itself. */
static int make_selector(struct dpuflow_doca *session, struct lane *lane, const char *name,
			 const struct doca_flow_match *match, bool roce)
{
	const struct dpuflow_doca_options *options = &session->options;
	unsigned int qps = roce && options->qps ? options->qps : 1;
	unsigned int opcodes = roce && options->opcodes ? options->opcodes : 1;
	struct doca_flow_fwd chosen, left = {.type = DOCA_FLOW_FWD_PIPE, .next_pipe = lane->head};
	struct doca_flow_monitor monitor = {0};
	struct pipe_plan plan = {
		.name = name, .match = match, .monitor = &monitor, .forward = &chosen, .miss = &left};

	forward_chosen(session, lane, &chosen);
	monitor.counter_type = DOCA_FLOW_RESOURCE_TYPE_NON_SHARED;
#if HAS_MIRROR
	monitor.shared_mirror_id = lane->mirror;
#endif
	plan.entries = qps * opcodes;
	if (make_pipe(session, &plan, &lane->head))
		return DPUFLOW_DOCA_FAILED;
	for (unsigned int k = 0; k < qps * opcodes; k++) {
		struct doca_flow_match one = *match;

		if (roce)
			match_roce_entry(&one, options->qps ? &options->qp[k % qps] : NULL,
					 options->opcodes ? &options->opcode[k / qps] : NULL);
		if (add_entry(session, name, lane->head, &one, &monitor, NULL, &lane->chosen[lane->choices]))
			return DPUFLOW_DOCA_FAILED;
		lane->choices++;
	}
	return DPUFLOW_DOCA_OK;
}

static int make_selectors(struct dpuflow_doca *session, struct lane *lane)
{
	const struct dpuflow_doca_options *options = &session->options;
	struct doca_flow_match match;

	lane->head = lane->pass;
	if (options->protocols & DPUFLOW_DOCA_ANY && options->copy_to[0]) {
		memset(&match, 0, sizeof(match));
		return make_selector(session, lane, "any", &match, false);
	}
	/* Queues take IP alone: what is none is not chosen, or it would count as copied and never come. */
	for (int six = 1; six >= 0 && options->protocols & DPUFLOW_DOCA_ANY; six--) {
		memset(&match, 0, sizeof(match));
		match_ip(&match, six);
		if (make_selector(session, lane, six ? "any IPv6" : "any IPv4", &match, false))
			return DPUFLOW_DOCA_FAILED;
	}
	if (options->protocols & DPUFLOW_DOCA_ANY)
		return DPUFLOW_DOCA_OK;
	for (int six = 1; six >= 0; six--) {
		memset(&match, 0, sizeof(match));
		match_tcp(&match, six);
		if (options->protocols & DPUFLOW_DOCA_TCP &&
		    make_selector(session, lane, six ? "TCP over IPv6" : "TCP over IPv4", &match, false))
			return DPUFLOW_DOCA_FAILED;
		memset(&match, 0, sizeof(match));
		match_roce(&match, six, options);
		if (options->protocols & DPUFLOW_DOCA_ROCE &&
		    make_selector(session, lane, six ? "RoCE over IPv6" : "RoCE over IPv4", &match, true))
			return DPUFLOW_DOCA_FAILED;
	}
	return DPUFLOW_DOCA_OK;
}

static int make_sampler(struct dpuflow_doca *session, struct lane *lane)
{
	struct doca_flow_match match = {0}, mask = {0};
	struct doca_flow_fwd drawn = {.type = DOCA_FLOW_FWD_PIPE, .next_pipe = lane->head};
	struct doca_flow_fwd left = {.type = DOCA_FLOW_FWD_PIPE, .next_pipe = lane->pass};
	struct pipe_plan plan = {.name = "sample", .entries = 1, .match = &match, .mask = &mask};

	plan.forward = &drawn;
	plan.miss = &left;
	match_random(&match, &mask, session->options.sample);
	if (make_pipe(session, &plan, &lane->head))
		return DPUFLOW_DOCA_FAILED;
	return add_entry(session, plan.name, lane->head, &match, NULL, NULL, NULL);
}

static const char *gate_name(const struct lane *lane)
{
	return lane->number ? "gate to the uplink" : "gate to the peer";
}

/* Production of a lane: what is all there is until the gate opens. */
static int make_production(struct dpuflow_doca *session, struct lane *lane)
{
	struct doca_flow_fwd production = {.type = DOCA_FLOW_FWD_PORT}, each = {.type = DOCA_FLOW_FWD_PIPE};
	struct doca_flow_fwd pass = {.type = DOCA_FLOW_FWD_PIPE};
	struct doca_flow_match match = {0}, mask = {0};
	struct pipe_plan gate = {.name = gate_name(lane), .entries = 1, .match = &match, .mask = &mask};
	int status = DPUFLOW_DOCA_OK;

	production.port_id = lane->out;
	if (session->options.production == DPUFLOW_DOCA_KERNEL)
		status = to_kernel(&production);
	if (!status)
		status = make_pass(session, lane->number ? "pass to the uplink" : "pass to the peer", &production,
				   NULL, NULL, &lane->pass);
	if (status)
		return status;
	match_port(&match, UINT32_MAX);
	match_port(&mask, UINT32_MAX);
	pass.next_pipe = lane->pass;
	gate.forward = &each;
	gate.miss = &pass;
	return make_pipe(session, &gate, &lane->gate);
}

/* From here on the card asks the root first. It sends what no entry takes to the kernel, also while it has none. */
static int make_root(struct dpuflow_doca *session)
{
	struct doca_flow_match match = {0}, mask = {0};
	struct doca_flow_fwd each = {.type = DOCA_FLOW_FWD_PIPE}, miss = {.type = DOCA_FLOW_FWD_PIPE};
	struct doca_flow_monitor monitor = {0};
	struct pipe_plan plan = {.name = "root", .root = true, .entries = LANES};

	match_port(&match, UINT32_MAX);
	match_port(&mask, UINT32_MAX);
	monitor.counter_type = DOCA_FLOW_RESOURCE_TYPE_NON_SHARED;
	miss.next_pipe = session->rest;
	plan.match = &match;
	plan.mask = &mask;
	plan.monitor = &monitor;
	plan.forward = &each;
	plan.miss = &miss;
	if (make_pipe(session, &plan, &session->root))
		return DPUFLOW_DOCA_FAILED;
	for (unsigned int k = 0; k < LANES; k++) {
		struct lane *lane = &session->lane[k];

		match_port(&match, lane->in);
		each.next_pipe = lane->gate;
		if (add_entry(session, plan.name, session->root, &match, &monitor, &each, &lane->entry))
			return DPUFLOW_DOCA_FAILED;
	}
	return DPUFLOW_DOCA_OK;
}

static int make_copies(struct dpuflow_doca *session, struct lane *lane)
{
	struct doca_flow_fwd head = {.type = DOCA_FLOW_FWD_PIPE};
	struct doca_flow_match match = {0};
	int status = make_copy(session, lane);

	if (!status)
		status = session->flood ? make_flood(session, lane) : make_mirror(session, lane);
	if (!status)
		status = make_selectors(session, lane);
	if (!status && session->options.sample)
		status = make_sampler(session, lane);
	if (status)
		return status;
	match_port(&match, lane->in);
	head.next_pipe = lane->head;
	return add_entry(session, gate_name(lane), lane->gate, &match, NULL, &head, &lane->open);
}

/* No more copies, and production as it was before there were any. */
int close_gates(struct dpuflow_doca *session)
{
	int status = DPUFLOW_DOCA_OK;

	for (unsigned int k = 0; k < LANES; k++) {
		struct lane *lane = &session->lane[k];

		if (lane->open && remove_entry(session, gate_name(lane), lane->open))
			status = DPUFLOW_DOCA_FAILED;
		lane->open = NULL;
	}
	return status;
}

int build_pipeline(struct dpuflow_doca *session)
{
	struct doca_flow_fwd kernel;
	int status = to_kernel(&kernel);

	if (!status)
		status = make_pass(session, "rest", &kernel, NULL, NULL, &session->rest);
	for (unsigned int k = 0; k < LANES && !status; k++) {
		session->lane[k].number = k;
		session->lane[k].in = session->number[k ? PEER : UPLINK];
		session->lane[k].out = session->number[k ? UPLINK : PEER];
		status = make_production(session, &session->lane[k]);
	}
	if (!status)
		status = make_root(session);
	for (unsigned int k = 0; k < LANES && !status; k++)
		status = make_copies(session, &session->lane[k]);
	return status;
}
