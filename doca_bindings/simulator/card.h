/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A card: what its eSwitch does, kept in a file that outlives the programs which configure it, as hardware does.
 * The simulated library writes it, the program `forward` (or a test's probe) moves packets through it.
 *
 * Where its owner dies, the kernel takes its rules back (mlx5 does so when the file of the verbs context closes).
 * Since nobody has tried that on a BlueField with DOCA Flow, a card can also be told to keep them (`stays`).
 */
#ifndef DPUFLOW_CARD_H
#define DPUFLOW_CARD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define CARD_MAGIC 0x44524143
#define CARD_PORTS 4
#define CARD_PIPES 48
#define CARD_ENTRIES 160
#define CARD_MIRRORS 8
#define CARD_TARGETS 4
#define CARD_QUEUES 4
#define CARD_SLOTS 8192 /* frames that a queue holds */
#define CARD_FRAME 9600
#define CARD_KINDS 24
#define CARD_NONE (-1)

enum card_port { CARD_UPLINK, CARD_HOST, CARD_VF, CARD_SF };

enum card_way { WAY_NONE, WAY_QUEUE, WAY_PORT, WAY_PIPE, WAY_DROP, WAY_KERNEL, WAY_OWN };

struct way {
	enum card_way kind;
	int32_t place; /* of the pipe, port or queue */
};

/* A field's value and mask for each that is simulated. */
enum card_field {
	FIELD_PORT,
	FIELD_RANDOM,
	FIELD_L3,
	FIELD_L4,
	FIELD_UDP_DESTINATION,
	FIELD_QP,
	FIELD_OPCODE,
	FIELDS
};

struct card_match {
	uint32_t value[FIELDS];
	uint32_t mask[FIELDS];
};

struct card_pipe {
	bool used, root, floods, counted;
	uint32_t room;
	struct card_match match;
	struct way forward, miss;
	uint32_t mirror;
};

struct card_entry {
	bool used, live, counted;
	int32_t pipe;
	uint32_t index; /* in a pipe that floods */
	struct card_match match;
	struct way forward;
	uint32_t mirror;
	uint64_t packets, bytes;
};

struct card_mirror {
	bool configured, bound;
	uint32_t targets;
	struct way target[CARD_TARGETS];
	struct way forward;
};

struct card_slot {
	uint32_t length;
	uint64_t stamp_ns;
	uint8_t bytes[CARD_FRAME];
};

struct card_queue {
	uint64_t written, taken, dropped;
	struct card_slot slot[CARD_SLOTS];
};

struct card {
	uint32_t magic;
	uint32_t release;
	pthread_mutex_t lock; /* robust: its holder may be killed */
	/* how the card is */
	bool stays;    /* rules outlive their owner */
	bool nic_mode; /* this function does not own the steering */
	bool no_kernel_rules;
	bool clock_is_wall; /* REAL_TIME_CLOCK_ENABLE */
	uint32_t split;	    /* bytes of a receive buffer; 0: a frame is in one */
	/* what is configured */
	bool ready; /* the owner has started the uplink's port */
	int32_t root;
	struct card_pipe pipe[CARD_PIPES];
	struct card_entry entry[CARD_ENTRIES];
	struct card_mirror mirror[CARD_MIRRORS];
	/* for tests */
	uint32_t fail_at; /* this call fails; 0: none */
	uint32_t die_at;  /* in this call the process is killed */
	uint32_t calls;
	int32_t objects[CARD_KINDS];
	uint32_t dark; /* calls after which production was not as it should be */
	char darkness[256];
	struct card_queue queue[CARD_QUEUES];
};

/* Where a packet comes out: at a port, or with `queue` at one of the receive queues. */
typedef void (*card_out)(void *context, bool queue, unsigned int place, const uint8_t *packet, uint32_t length);

struct card *card_open(const char *path, bool create);
void card_close(struct card *card);
void card_lock(struct card *card);
void card_unlock(struct card *card);
void card_reset(struct card *card);
bool card_owned(const char *path); /* by a living process */
int card_own(const char *path);	   /* a descriptor to hold; negative where another has it */
void card_forward(struct card *card, unsigned int port, const uint8_t *packet, uint32_t length, uint16_t drawn,
		  bool count, card_out out, void *context);
unsigned int card_kernel_way(unsigned int port);
void card_queue_put(struct card *card, unsigned int queue, const uint8_t *packet, uint32_t length);

#endif
