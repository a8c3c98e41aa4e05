/* SPDX-License-Identifier: Apache-2.0 */
/* The card's file, and how packets go through what is configured in it. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "card.h"

#define DEPTH 32 /* pipes that a packet may go through */

struct packet {
	struct card *card;
	const uint8_t *bytes;
	uint32_t length;
	uint32_t field[FIELDS];
	bool has[FIELDS];
	unsigned int port;
	bool count;
	card_out out;
	void *context;
};

struct card *card_open(const char *path, bool create)
{
	int file = open(path, O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_TRUNC : 0), 0600);
	struct card *card;

	if (file < 0)
		return NULL;
	if (create && ftruncate(file, sizeof(*card))) {
		close(file);
		return NULL;
	}
	card = mmap(NULL, sizeof(*card), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	if (card == MAP_FAILED)
		return NULL;
	if (create) {
		pthread_mutexattr_t how;

		pthread_mutexattr_init(&how);
		pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
		pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
		pthread_mutex_init(&card->lock, &how);
		pthread_mutexattr_destroy(&how);
		card->root = CARD_NONE;
		card->magic = CARD_MAGIC;
	}
	return card;
}

void card_close(struct card *card)
{
	munmap(card, sizeof(*card));
}

void card_lock(struct card *card)
{
	if (pthread_mutex_lock(&card->lock) == EOWNERDEAD)
		pthread_mutex_consistent(&card->lock);
}

void card_unlock(struct card *card)
{
	pthread_mutex_unlock(&card->lock);
}

/* The rules go, and what waits in the queues. */
void card_reset(struct card *card)
{
	card->ready = false;
	card->no_kernel_rules = false;
	card->root = CARD_NONE;
	memset(card->pipe, 0, sizeof(card->pipe));
	memset(card->entry, 0, sizeof(card->entry));
	memset(card->mirror, 0, sizeof(card->mirror));
	for (unsigned int k = 0; k < CARD_QUEUES; k++)
		card->queue[k].taken = card->queue[k].written;
}

static int owner_file(const char *path)
{
	char name[512];

	snprintf(name, sizeof(name), "%s.owner", path);
	return open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
}

int card_own(const char *path)
{
	int file = owner_file(path);

	if (file >= 0 && flock(file, LOCK_EX | LOCK_NB)) {
		close(file);
		return -1;
	}
	return file;
}

bool card_owned(const char *path)
{
	int file = owner_file(path);
	bool free = file >= 0 && !flock(file, LOCK_SH | LOCK_NB);

	if (file >= 0)
		close(file);
	return !free;
}

/* What the kernel's rules do, which OVS has made: the host is behind the uplink. */
unsigned int card_kernel_way(unsigned int port)
{
	return port == CARD_UPLINK ? CARD_HOST : CARD_UPLINK;
}

/* -- parser ------------------------------------------------------------------------------------ */

static uint32_t be16(const uint8_t *at)
{
	return (uint32_t)at[0] << 8 | at[1];
}

static void learn(struct packet *packet, enum card_field field, uint32_t value)
{
	packet->field[field] = value;
	packet->has[field] = true;
}

static void parse(struct packet *packet)
{
	const uint8_t *bytes = packet->bytes;
	uint32_t at = 14, kind, protocol, transport;

	if (packet->length < 14)
		return;
	kind = be16(bytes + 12);
	while ((kind == 0x8100 || kind == 0x88a8) && packet->length >= at + 4) {
		kind = be16(bytes + at + 2);
		at += 4;
	}
	if (kind == 0x0800 && packet->length >= at + 20) {
		learn(packet, FIELD_L3, 1);
		protocol = be16(bytes + at + 6) & 0x1fff ? 256 : bytes[at + 9];
		transport = at + (bytes[at] & 15) * 4;
	} else if (kind == 0x86dd && packet->length >= at + 40) {
		learn(packet, FIELD_L3, 2);
		protocol = bytes[at + 6];
		transport = at + 40;
	} else {
		return;
	}
	if (protocol == 6)
		learn(packet, FIELD_L4, 1);
	if (protocol != 17 || packet->length < transport + 8)
		return;
	learn(packet, FIELD_L4, 2);
	learn(packet, FIELD_UDP_DESTINATION, be16(bytes + transport + 2));
	if (packet->field[FIELD_UDP_DESTINATION] != 4791 || packet->length < transport + 20)
		return;
	learn(packet, FIELD_OPCODE, bytes[transport + 8]);
	learn(packet, FIELD_QP, (uint32_t)bytes[transport + 13] << 16 | be16(bytes + transport + 14));
}

/* -- pipes ------------------------------------------------------------------------------------- */

static bool matches(const struct packet *packet, const struct card_match *match)
{
	for (int k = 0; k < FIELDS; k++)
		if (match->mask[k] &&
		    (!packet->has[k] || (packet->field[k] & match->mask[k]) != (match->value[k] & match->mask[k])))
			return false;
	return true;
}

static void go(struct packet *packet, const struct way *way, unsigned int depth);

static void out(struct packet *packet, bool queue, unsigned int place)
{
	packet->out(packet->context, queue, place, packet->bytes, packet->length);
}

static void hit(struct packet *packet, const struct card_pipe *pipe, struct card_entry *entry, unsigned int depth)
{
	const struct way *way = entry->forward.kind != WAY_NONE ? &entry->forward : &pipe->forward;
	uint32_t id = entry->mirror ? entry->mirror : pipe->mirror;

	if (packet->count && entry->counted) {
		entry->packets++;
		entry->bytes += packet->length;
	}
	if (id) {
		struct card_mirror *mirror = &packet->card->mirror[id];

		for (uint32_t k = 0; k < mirror->targets; k++)
			go(packet, &mirror->target[k], depth + 1);
		if (packet->card->release < 209)
			way = &mirror->forward; /* empty: the original is dropped */
	}
	go(packet, way, depth + 1);
}

static void through(struct packet *packet, int place, unsigned int depth)
{
	struct card *card = packet->card;
	const struct card_pipe *pipe;

	if (depth > DEPTH || place < 0 || place >= CARD_PIPES || !card->pipe[place].used)
		return; /* a pipe that is gone takes its packets with it */
	pipe = &card->pipe[place];
	for (uint32_t index = 0; pipe->floods && index < pipe->room; index++)
		for (int k = 0; k < CARD_ENTRIES; k++)
			if (card->entry[k].live && card->entry[k].pipe == place && card->entry[k].index == index)
				hit(packet, pipe, &card->entry[k], depth);
	if (pipe->floods)
		return;
	for (int k = 0; k < CARD_ENTRIES; k++) {
		if (card->entry[k].live && card->entry[k].pipe == place && matches(packet, &card->entry[k].match)) {
			hit(packet, pipe, &card->entry[k], depth);
			return;
		}
	}
	go(packet, &pipe->miss, depth + 1);
}

static void go(struct packet *packet, const struct way *way, unsigned int depth)
{
	switch (way->kind) {
	case WAY_PIPE:
		through(packet, way->place, depth);
		break;
	case WAY_PORT:
		out(packet, false, way->place);
		break;
	case WAY_QUEUE:
		out(packet, true, way->place);
		break;
	case WAY_KERNEL:
		out(packet, false, card_kernel_way(packet->port));
		break;
	default:
		break; /* dropped */
	}
}

void card_forward(struct card *card, unsigned int port, const uint8_t *bytes, uint32_t length, uint16_t drawn,
		  bool count, card_out deliver, void *context)
{
	struct packet packet = {.card = card, .bytes = bytes, .length = length, .port = port};

	packet.count = count;
	packet.out = deliver;
	packet.context = context;
	learn(&packet, FIELD_PORT, port);
	learn(&packet, FIELD_RANDOM, drawn);
	parse(&packet);
	if (card->root != CARD_NONE)
		through(&packet, card->root, 0);
	else if (!card->no_kernel_rules)
		out(&packet, false, card_kernel_way(port));
}

void card_queue_put(struct card *card, unsigned int place, const uint8_t *packet, uint32_t length)
{
	struct card_queue *queue = &card->queue[place];
	struct card_slot *slot = &queue->slot[queue->written % CARD_SLOTS];
	struct timespec now;

	if (queue->written - queue->taken == CARD_SLOTS) {
		queue->dropped++;
		return;
	}
	clock_gettime(card->clock_is_wall ? CLOCK_REALTIME : CLOCK_MONOTONIC, &now);
	slot->stamp_ns = now.tv_sec * 1000000000ull + now.tv_nsec;
	slot->length = length < CARD_FRAME ? length : CARD_FRAME;
	memcpy(slot->bytes, packet, slot->length);
	queue->written++;
}
