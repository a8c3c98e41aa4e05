/* SPDX-License-Identifier: Apache-2.0 */
/* The sessions behind dpuflow_doca.h: what is opened in which order, and given back in which. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "adapter.h"

#define IDLE_NS 20000	  /* between looks at an empty queue: 50 frames of 4 KiB at 100 Gbit/s */
#define PATIENCE 64	  /* empty looks before the first pause */
#define LINGER_NS 2000000 /* what was copied before the gates closed has arrived by then */

static struct dpuflow_doca *opened; /* DOCA Flow and DPDK have one owner in a process */

void dpuflow_doca_describe(struct dpuflow_doca_facts *facts)
{
	memset(facts, 0, sizeof(*facts));
	facts->abi = DPUFLOW_DOCA_ABI;
	facts->release = RELEASE;
	facts->mirror = HAS_MIRROR;
	facts->flooding = HAS_FLOODING;
	facts->bth = HAS_BTH;
	facts->dpdk = !QUEUES_WITHOUT_DPDK;
	facts->fresh_ms = QUEUES_WITHOUT_DPDK ? 1000 : 0; /* the service thread's cycle */
	facts->devices = count_devices();
	snprintf(facts->version, sizeof(facts->version), "%d.%d.%d", RELEASE / 100, RELEASE % 100, RELEASE_PATCH);
}

static void *receive_thread(void *argument)
{
	struct dpuflow_doca *session = argument;
	const struct timespec pause = {.tv_nsec = IDLE_NS};
	unsigned int empty = 0;

	while (!atomic_load_explicit(&session->stopping, memory_order_acquire)) {
		if (receive_some(session)) {
			empty = 0;
		} else if (++empty > PATIENCE) {
			nanosleep(&pause, NULL);
		}
	}
	while (receive_some(session))
		;
	return NULL;
}

static void stop_thread(struct dpuflow_doca *session)
{
	if (!session->threaded)
		return;
	atomic_store_explicit(&session->stopping, true, memory_order_release);
	pthread_join(session->thread, NULL);
	session->threaded = false;
}

/* Before the other pipes: with the root gone the kernel's rules forward, whatever becomes of them. */
static void remove_root(struct dpuflow_doca *session)
{
	if (session->root)
		doca_flow_pipe_destroy(session->root);
	session->root = NULL;
}

/* Reverse of the opening, with all that a session of any state has. A fault is said, and the rest still done. */
static void give_back(struct dpuflow_doca *session)
{
	doca_error_t error;

	close_gates(session);
	stop_thread(session);
	remove_root(session);
	for (unsigned int place = MAX_PORTS; place-- > 0;)
		if (session->port[place])
			doca_flow_port_pipes_flush(session->port[place]);
	/* The uplink last: the others depend on it. */
	for (unsigned int place = MAX_PORTS; place-- > 0;) {
		if (!session->port[place])
			continue;
		error = doca_flow_port_stop(session->port[place]);
		if (error != DOCA_SUCCESS)
			failed(error, "port %u cannot be stopped", session->number[place]);
		session->port[place] = NULL;
	}
	if (session->flow)
		doca_flow_destroy();
	session->flow = false;
	receive_close(session);
	close_device(session);
	ring_close(&session->ring);
	free(session);
	opened = NULL;
}

static int start(struct dpuflow_doca *session)
{
	int status = ring_open(&session->ring, session->options.copy_to[0] ? 0 : session->options.ring);

	if (!status)
		status = open_device(session);
	if (!status)
		status = receive_open(session);
	if (!status)
		status = start_flow(session);
	for (unsigned int place = 0; place < session->ports && !status; place++)
		status = start_port(session, place);
	if (!status)
		status = build_pipeline(session);
	if (!status && !session->options.copy_to[0]) {
		if (pthread_create(&session->thread, NULL, receive_thread, session))
			return say(DPUFLOW_DOCA_MISSING, "no thread can be started that receives the copies");
		session->threaded = true;
	}
	return status;
}

int dpuflow_doca_open(const struct dpuflow_doca_options *options, dpuflow_doca **session)
{
	struct dpuflow_doca *made;
	int status;

	*session = NULL;
	say_nothing();
	status = check_options(options);
	if (status)
		return status;
	if (opened)
		return say(DPUFLOW_DOCA_REFUSED, "this process has a session already: DOCA Flow allows one");
	made = calloc(1, sizeof(*made));
	if (!made)
		return say(DPUFLOW_DOCA_MISSING, "no memory for a session");
	opened = made;
	made->options = *options;
	made->flood = HAS_FLOODING && options->method != DPUFLOW_DOCA_MIRROR;
	made->ports = options->copy_to[0] ? 3 : 2;
	status = start(made);
	if (status) {
		give_back(made);
		return status;
	}
	*session = made;
	return DPUFLOW_DOCA_OK;
}

int dpuflow_doca_poll(dpuflow_doca *session, void *room, uint64_t bytes)
{
	say_nothing();
	if (bytes < sizeof(struct dpuflow_doca_block))
		return say(DPUFLOW_DOCA_REFUSED, "%llu bytes are no room for packets", (unsigned long long)bytes);
	ring_take(&session->ring, room, bytes);
	return DPUFLOW_DOCA_OK;
}

int dpuflow_doca_count(dpuflow_doca *session, struct dpuflow_doca_counters *counters)
{
	int status = DPUFLOW_DOCA_OK;
	uint64_t missed = 0;

	say_nothing();
	memset(counters, 0, sizeof(*counters));
	counters->received = atomic_load(&session->received);
	counters->ring_full = atomic_load(&session->ring_full);
	counters->broken = atomic_load(&session->broken);
	counters->hardware = atomic_load(&session->hardware);
	for (unsigned int k = 0; k < LANES; k++) {
		struct lane *lane = &session->lane[k];

		if (count_entry(lane->entry, &counters->production[k]))
			status = DPUFLOW_DOCA_FAILED;
		for (unsigned int choice = 0; choice < lane->choices; choice++)
			if (count_entry(lane->chosen[choice], &counters->copied[k]))
				status = DPUFLOW_DOCA_FAILED;
	}
	if (!session->options.copy_to[0] && receive_missed(session, &missed))
		status = DPUFLOW_DOCA_FAILED;
	counters->no_buffer = atomic_load(&session->no_buffer) + missed;
	return status;
}

int dpuflow_doca_stop(dpuflow_doca *session)
{
	const struct timespec linger = {.tv_nsec = LINGER_NS};

	say_nothing();
	close_gates(session);
	nanosleep(&linger, NULL);
	stop_thread(session);
	return said() ? DPUFLOW_DOCA_FAILED : DPUFLOW_DOCA_OK;
}

int dpuflow_doca_close(dpuflow_doca *session)
{
	say_nothing();
	if (session)
		give_back(session);
	return said() ? DPUFLOW_DOCA_FAILED : DPUFLOW_DOCA_OK;
}

const char *dpuflow_doca_method_name(const dpuflow_doca *session)
{
	return session->flood ? "flooding hash pipe" : "shared mirror";
}
