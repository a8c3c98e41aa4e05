/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The card at work: forward CARD make | set NAME VALUE | show
 *                   forward CARD run IN.pcap OUT-PREFIX [RATE]
 * `run` sends the packets of a classic pcap file through the card, at their whole length, from the host where the
 * source's MAC address is odd and else from the uplink, and writes what comes out of each port to
 * OUT-PREFIX.PORT.pcap. A card whose owner is dead loses its rules first, unless it is told to keep them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "card.h"

static const char *const port_names[] = {"uplink", "host", "vf", "sf"};
static FILE *files[CARD_PORTS];
static struct card *card;
static uint64_t stamp_s, stamp_part;

static void die(const char *why, const char *what)
{
	fprintf(stderr, "forward: %s: %s\n", what, why);
	exit(1);
}

static void emit(void *context, bool queue, unsigned int place, const uint8_t *packet, uint32_t length)
{
	uint32_t head[4] = {stamp_s, stamp_part, length, length};

	(void)context;
	if (queue) {
		card_queue_put(card, place, packet, length);
		return;
	}
	fwrite(head, sizeof(head), 1, files[place]);
	fwrite(packet, length, 1, files[place]);
}

static void run(const char *path, const char *in, const char *out, double rate)
{
	static uint8_t packet[CARD_FRAME];
	uint32_t file_head[6], head[4], drawn = 12345, number = 0;
	char name[512];
	FILE *file = fopen(in, "rb");

	if (!file || fread(file_head, sizeof(file_head), 1, file) != 1 ||
	    (file_head[0] != 0xa1b2c3d4 && file_head[0] != 0xa1b23c4d))
		die("no classic pcap file", in);
	for (int k = 0; k < CARD_PORTS; k++) {
		snprintf(name, sizeof(name), "%s.%s.pcap", out, port_names[k]);
		files[k] = fopen(name, "wb");
		if (!files[k])
			die("cannot be written", name);
		fwrite(file_head, sizeof(file_head), 1, files[k]);
	}
	while (fread(head, sizeof(head), 1, file) == 1) {
		/* Packets were cut by whoever captured them; here they have their whole length again. */
		memset(packet, 0, sizeof(packet));
		if (head[2] > CARD_FRAME || fread(packet, 1, head[2], file) != head[2])
			die("broken", in);
		if (head[3] > CARD_FRAME)
			head[3] = CARD_FRAME;
		stamp_s = head[0];
		stamp_part = head[1];
		drawn = drawn * 1103515245 + 12345;
		card_lock(card);
		if (!card->stays && !card_owned(path))
			card_reset(card);
		card_forward(card, packet[11] & 1, packet, head[3], drawn >> 16, true, emit, NULL);
		card_unlock(card);
		number++;
		if (rate > 0) {
			struct timespec pause = {.tv_nsec = 1e9 / rate};

			nanosleep(&pause, NULL);
		}
	}
	fclose(file);
	for (int k = 0; k < CARD_PORTS; k++)
		fclose(files[k]);
	printf("%u\n", number);
}

static void set(const char *name, uint32_t value)
{
	if (!strcmp(name, "stays"))
		card->stays = value;
	else if (!strcmp(name, "nic_mode"))
		card->nic_mode = value;
	else if (!strcmp(name, "clock_is_wall"))
		card->clock_is_wall = value;
	else if (!strcmp(name, "split"))
		card->split = value;
	else if (!strcmp(name, "fail_at"))
		card->fail_at = value;
	else if (!strcmp(name, "die_at"))
		card->die_at = value;
	else if (!strcmp(name, "calls"))
		card->calls = value;
	else
		die("no such setting", name);
}

static void show(const char *path)
{
	uint32_t used = 0, live = 0;
	int32_t objects = 0;
	uint64_t dropped = 0;

	for (int k = 0; k < CARD_QUEUES; k++)
		dropped += card->queue[k].dropped;
	for (int k = 0; k < CARD_PIPES; k++)
		used += card->pipe[k].used;
	for (int k = 0; k < CARD_ENTRIES; k++)
		live += card->entry[k].live;
	for (int k = 0; k < CARD_KINDS; k++)
		objects += card->objects[k];
	printf("owned %d\nroot %d\npipes %u\nentries %u\nobjects %d\ncalls %u\ndark %u\n", card_owned(path),
	       card->root >= 0, used, live, objects, card->calls, card->dark);
	printf("dropped %llu\n", (unsigned long long)dropped);
	printf("darkness %s\n", card->darkness);
}

int main(int count, char **words)
{
	if (count < 3)
		die("CARD make|set|show|run", "usage");
	card = card_open(words[1], !strcmp(words[2], "make"));
	if (!card || card->magic != CARD_MAGIC)
		die("no card", words[1]);
	if (!strcmp(words[2], "set") && count == 5)
		set(words[3], strtoul(words[4], NULL, 0));
	else if (!strcmp(words[2], "show"))
		show(words[1]);
	else if (!strcmp(words[2], "run") && count >= 5)
		run(words[1], words[3], words[4], count > 5 ? atof(words[5]) : 0);
	else if (strcmp(words[2], "make"))
		die("not understood", words[2]);
	card_close(card);
	return 0;
}
