/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the simulated library share. */
#ifndef DPUFLOW_SIM_H
#define DPUFLOW_SIM_H

#include <stdbool.h>
#include <stdint.h>

#include <doca_dev.h>
#include <doca_error.h>
#include <doca_flow.h>

#include "card.h"

enum kind {
	KIND_LIST,
	KIND_DEVICE,
	KIND_REP_LIST,
	KIND_REP,
	KIND_FLOW,
	KIND_FLOW_CFG,
	KIND_PORT_CFG,
	KIND_PIPE_CFG,
	KIND_PORT,
	KIND_PIPE,
	KIND_ENTRY,
	KIND_ETHDEV,
	KIND_POOL,
	KIND_BUFFER,
	KIND_ENGINE,
	KIND_RXQ,
	KIND_MAP,
	KIND_RUNNING,
	KINDS
};

struct doca_dev {
	bool probed;
	unsigned int users;
};

struct doca_dev_rep {
	enum card_port port;
	struct doca_dev *device;
	unsigned int users;
};

struct settings { /* of doca_flow_init */
	uint16_t queues;
	uint32_t counters;
	uint32_t mirrors;
	char mode[64];
	doca_flow_entry_process_cb done;
};

struct port_settings {
	int number;
	struct doca_dev *device;
	struct doca_dev_rep *representor;
	uint32_t action_bytes;
};

struct pipe_settings {
	struct doca_flow_port *port;
	enum doca_flow_pipe_type type;
	bool root;
	uint32_t entries;
	bool matched, masked, monitored;
	struct doca_flow_match match, mask;
	struct doca_flow_monitor monitor;
	uint32_t algorithms;
};

struct sim {
	struct card *card;
	char path[400];
	int owner; /* descriptor; 0: not the owner */
	bool eal;
	bool isolated;
};

extern struct sim sim;

/* Every call of the library that configures anything begins with CALL. What it comes to is looked at when the next
 * one begins: packets are sent through the card as it then is. */
#define CALL()                                                                                                       \
	do {                                                                                                         \
		if (sim_call(__func__))                                                                              \
			return DOCA_ERROR_DRIVER;                                                                    \
	} while (0)

bool sim_call(const char *name); /* true: this one is to fail */
void sim_look(const char *name);
void sim_made(enum kind kind);
void sim_gone(enum kind kind);
doca_error_t sim_no(doca_error_t error, const char *why);

/* flow.c, for settings.c */
doca_error_t flow_start(const struct settings *settings);
doca_error_t port_start(const struct port_settings *settings, struct doca_flow_port **port);
doca_error_t pipe_create(const struct pipe_settings *settings, const struct doca_flow_fwd *fwd,
			 const struct doca_flow_fwd *fwd_miss, struct doca_flow_pipe **pipe);

/* fields.c */
doca_error_t read_match(const struct doca_flow_match *match, const struct doca_flow_match *mask,
			struct card_match *read, uint32_t own[FIELDS]);

/* dpdk.c and queue.c */
bool ethdev_started(unsigned int number);
enum card_port ethdev_port(unsigned int number);
bool queue_there(unsigned int number);

#endif
