/* SPDX-License-Identifier: Apache-2.0 */
/* What the adapter's files share. */
#ifndef DPUFLOW_ADAPTER_H
#define DPUFLOW_ADAPTER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "release.h"

#include <doca_dev.h>
#include <doca_error.h>
#include <doca_flow.h>

#include "dpuflow_doca.h"

#define LANES 2	     /* 0: from the uplink to the peer, 1: back; a queue of its own for each */
#define MAX_PORTS 3  /* uplink, peer, where copies go */
#define SELECTORS 4  /* pipes that choose what is copied: RoCE and TCP, IPv4 and IPv6 */
#define COUNTERS 256 /* quota: one for each lane, one for each entry that chooses */
#define UPLINK 0
#define PEER 1
#define COPIES 2

struct lane {
	unsigned int number;
	uint16_t in, out;	     /* DOCA Flow's port numbers */
	struct doca_flow_pipe *pass; /* production */
	struct doca_flow_pipe *gate; /* to pass, and with its entry to head */
	struct doca_flow_pipe *copy;
	struct doca_flow_pipe *flood;
	struct doca_flow_pipe *head;	    /* chooses what is copied */
	uint32_t mirror;		    /* 0: none */
	struct doca_flow_pipe_entry *entry; /* of the root */
	struct doca_flow_pipe_entry *open;  /* of the gate */
	struct doca_flow_pipe_entry *chosen[SELECTORS * DPUFLOW_DOCA_QPS * DPUFLOW_DOCA_OPCODES];
	unsigned int choices;
};

/* Records on their way from the receiving thread to poll(): one writer, one reader. */
struct ring {
	uint8_t *bytes;
	uint64_t size;	  /* a power of two */
	uint64_t pending; /* bytes of the record that is being written */
	_Atomic uint64_t written, taken;
};

struct dpuflow_doca {
	struct dpuflow_doca_options options;
	bool flood;
	struct doca_dev *device;
	struct doca_dev_rep *representor[MAX_PORTS];
	struct doca_flow_port *port[MAX_PORTS];
	uint16_t number[MAX_PORTS]; /* of each port; set by receive_open */
	unsigned int ports;	    /* how many are wanted */
	bool flow;		    /* doca_flow_init was done */
	struct doca_flow_pipe *root, *rest;
	struct lane lane[LANES];
	struct receive *receive;
	struct ring ring;
	pthread_t thread;
	bool threaded;
	_Atomic bool stopping;
	_Atomic uint64_t received, ring_full, no_buffer, broken, hardware;
};

struct pipe_plan {
	const char *name;
	bool root, floods;
	uint32_t entries;
	const struct doca_flow_match *match, *mask; /* NULL: everything */
	const struct doca_flow_monitor *monitor;
	const struct doca_flow_fwd *forward, *miss;
};

/* say.c */
int say(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
int failed(doca_error_t error, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool said(void);
void say_nothing(void);

/* plan.c */
int check_options(const struct dpuflow_doca_options *options);

/* device.c */
int open_device(struct dpuflow_doca *session);
void close_device(struct dpuflow_doca *session);
uint32_t count_devices(void);

/* flow_struct.c up to 2.6, flow_opaque.c from 2.7 */
int start_flow(struct dpuflow_doca *session);
int start_port(struct dpuflow_doca *session, unsigned int place);
int make_pipe(struct dpuflow_doca *session, const struct pipe_plan *plan, struct doca_flow_pipe **pipe);

/* entries.c */
void entry_done(struct doca_flow_pipe_entry *entry, uint16_t queue, enum doca_flow_entry_status status,
		enum doca_flow_entry_op op, void *context);
int add_entry(struct dpuflow_doca *session, const char *name, struct doca_flow_pipe *pipe,
	      const struct doca_flow_match *match, const struct doca_flow_monitor *monitor,
	      const struct doca_flow_fwd *forward, struct doca_flow_pipe_entry **entry);
int add_flood_entry(struct dpuflow_doca *session, const char *name, struct doca_flow_pipe *pipe, uint32_t index,
		    const struct doca_flow_fwd *forward);
int remove_entry(struct dpuflow_doca *session, const char *name, struct doca_flow_pipe_entry *entry);
int count_entry(struct doca_flow_pipe_entry *entry, uint64_t *packets);

/* match.c */
void match_port(struct doca_flow_match *match, uint32_t port);
void match_random(struct doca_flow_match *match, struct doca_flow_match *mask, unsigned int bits);
void match_ip(struct doca_flow_match *match, bool six);
void match_roce(struct doca_flow_match *match, bool six, const struct dpuflow_doca_options *options);
void match_roce_entry(struct doca_flow_match *match, const uint32_t *qp, const uint8_t *opcode);
void match_tcp(struct doca_flow_match *match, bool six);

/* pipeline.c, copy_mirror.c, copy_flood.c */
int build_pipeline(struct dpuflow_doca *session);
int close_gates(struct dpuflow_doca *session);
int make_pass(struct dpuflow_doca *session, const char *name, const struct doca_flow_fwd *forward,
	      const struct doca_flow_match *match, const struct doca_flow_fwd *miss, struct doca_flow_pipe **pipe);
int make_mirror(struct dpuflow_doca *session, struct lane *lane);
int make_flood(struct dpuflow_doca *session, struct lane *lane);
void forward_chosen(const struct dpuflow_doca *session, const struct lane *lane, struct doca_flow_fwd *forward);

/* receive_dpdk.c up to 3.2, receive_queue.c from 3.3 */
int receive_open(struct dpuflow_doca *session);
unsigned int receive_some(struct dpuflow_doca *session);
int receive_missed(struct dpuflow_doca *session, uint64_t *packets);
int receive_close(struct dpuflow_doca *session);

/* ring.c */
int ring_open(struct ring *ring, uint64_t bytes);
void ring_close(struct ring *ring);
uint8_t *ring_reserve(struct dpuflow_doca *session, uint32_t length, uint64_t stamp_ns, unsigned int lane,
		      uint32_t *captured);
void ring_submit(struct dpuflow_doca *session);
void ring_take(struct ring *ring, uint8_t *room, uint64_t bytes);
uint64_t wall_clock(void);
uint64_t best_stamp(struct dpuflow_doca *session, uint64_t hardware_ns, uint64_t arrival_ns);

#endif
