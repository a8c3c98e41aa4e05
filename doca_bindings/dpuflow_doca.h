/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one interface between dpuflow and DOCA: copies of chosen traffic of a BlueField's eSwitch, with
 * production going on as before. Compiled on the target against its own DOCA; stable whatever DOCA does.
 *
 * Functions return a status; dpuflow_doca_error() has the sentence. One session at a time. poll, count, stop and
 * close of a session are called from one thread.
 */
#ifndef DPUFLOW_DOCA_H
#define DPUFLOW_DOCA_H

#include <stdint.h>

/* What dpuflow/live/doca_abi.py repeats begins here; a test compares them. */

enum {
	DPUFLOW_DOCA_ABI = 1, /* grows with any change below */
	DPUFLOW_DOCA_QPS = 16,
	DPUFLOW_DOCA_OPCODES = 8,
};

enum dpuflow_doca_status {
	DPUFLOW_DOCA_OK,
	DPUFLOW_DOCA_REFUSED, /* the options cannot be, here or anywhere */
	DPUFLOW_DOCA_MISSING, /* the machine lacks something: card, device, representor, hugepages */
	DPUFLOW_DOCA_FAILED,  /* DOCA failed; all has been given back */
};

enum dpuflow_doca_protocol {
	DPUFLOW_DOCA_ROCE = 1, /* RoCEv2: UDP to port 4791 */
	DPUFLOW_DOCA_TCP = 2,
	DPUFLOW_DOCA_ANY = 4, /* every packet of IPv4 and IPv6 */
};

enum dpuflow_doca_method {
	DPUFLOW_DOCA_BEST,   /* flooding where the release has it */
	DPUFLOW_DOCA_MIRROR, /* the shared mirror, 2.5 to 3.1 */
	DPUFLOW_DOCA_FLOOD,  /* a hash pipe that floods, from 3.1 */
};

enum dpuflow_doca_production {
	DPUFLOW_DOCA_PAIR,   /* uplink to peer and back, by the card itself */
	DPUFLOW_DOCA_KERNEL, /* what the kernel has set up for the eSwitch, as before */
};

struct dpuflow_doca_options {
	uint32_t abi;	    /* DPUFLOW_DOCA_ABI of the caller */
	uint32_t bytes;	    /* sizeof of this struct */
	char device[32];    /* PCI address of the card's physical function: 0000:03:00.0 */
	char peer[16];	    /* the other side of the uplink: hpf, vfN or sfN */
	char copy_to[16];   /* empty: to poll(); else the representor that gets the copies: sfN */
	uint32_t protocols; /* of dpuflow_doca_protocol */
	uint32_t method;
	uint32_t production;
	uint32_t sample;  /* of 2^sample packets one is copied, drawn by the card; 0: all */
	uint32_t snaplen; /* bytes to keep of a packet */
	uint32_t frame;	  /* bytes of the largest frame */
	uint32_t qps;	  /* destination QPs to copy; 0: all. Needs DOCA 3.3 */
	uint32_t opcodes; /* BTH opcodes to copy; 0: all. Needs DOCA 3.3 */
	uint32_t qp[DPUFLOW_DOCA_QPS];
	uint8_t opcode[DPUFLOW_DOCA_OPCODES];
	uint64_t ring; /* bytes between the receiving thread and poll() */
};

/* What was compiled, and what is there. */
struct dpuflow_doca_facts {
	uint32_t abi;
	uint32_t release;  /* of the headers: 207 is 2.7 */
	uint32_t mirror;   /* 1: has the shared mirror */
	uint32_t flooding; /* 1: has the hash pipe that floods */
	uint32_t bth;	   /* 1: matches QP and opcode */
	uint32_t dpdk;	   /* 1: receives by DPDK */
	uint32_t fresh_ms; /* how old the card's counters may be */
	uint32_t devices;  /* DOCA devices of this machine */
	char version[32];  /* of the headers */
};

/*
 * A packet, as in a block of a TPACKET_V3 ring (packet(7)), so that one reader serves both: this head,
 * `captured` bytes at `data`, and the next record `next` bytes further.
 */
struct dpuflow_doca_record {
	uint32_t next;
	uint32_t seconds;
	uint32_t nanoseconds;
	uint32_t captured;
	uint32_t length; /* on the wire */
	uint32_t status;
	uint16_t data;
	uint16_t reserved1[3];
	uint32_t reserved2[4];
	uint8_t reserved3[10];
	uint8_t direction; /* 0: came from the uplink, 4: went to it */
	uint8_t reserved4[5];
	uint8_t room[16];
};

/* What stands before the records that poll() gives. */
struct dpuflow_doca_block {
	uint32_t version;
	uint32_t reserved1;
	uint32_t status;
	uint32_t records;
	uint32_t first; /* bytes to the first record */
	uint32_t bytes;	  /* of it all */
	uint64_t waiting; /* bytes that were in the ring */
	uint64_t ring;	  /* its size */
	uint64_t reserved2;
};

struct dpuflow_doca_counters {
	uint64_t production[2]; /* packets from the uplink, to the uplink, as the card counts them */
	uint64_t copied[2];	/* copies that the card made */
	uint64_t received;	/* by the receiving thread */
	uint64_t ring_full;	/* lost: poll() came too late */
	uint64_t no_buffer;	/* lost: the receive queue had no room */
	uint64_t broken;	/* frames whose bytes could not be had */
	uint64_t hardware;	/* stamps taken from the card */
};

typedef struct dpuflow_doca dpuflow_doca;

void dpuflow_doca_describe(struct dpuflow_doca_facts *facts);
int dpuflow_doca_open(const struct dpuflow_doca_options *options, dpuflow_doca **session);
int dpuflow_doca_poll(dpuflow_doca *session, void *room, uint64_t bytes);
int dpuflow_doca_count(dpuflow_doca *session, struct dpuflow_doca_counters *counters);
int dpuflow_doca_stop(dpuflow_doca *session);
int dpuflow_doca_close(dpuflow_doca *session);
const char *dpuflow_doca_error(void);
const char *dpuflow_doca_method_name(const dpuflow_doca *session);

/* What dpuflow/live/doca_abi.py repeats ends here. */

#endif
