/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every way in which set-up can fail: drive CARD [COPY-TO] opens a session once to learn how many calls that takes,
 * and then once for each call, which fails. Each time forwarding must be as it was, all be given back, and a
 * sentence be said. Run under sanitizers it finds what leaks. With DPUFLOW_DRIVE_ONCE one session on a card that is
 * there, for those who kill it meanwhile.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "card.h"
#include "dpuflow_doca.h"

static struct card *card;
static unsigned int faults;

static void fault(unsigned int call, const char *what)
{
	printf("call %u: %s (%s)\n", call, what, dpuflow_doca_error());
	faults++;
}

static void check(unsigned int call)
{
	for (int k = 0; k < CARD_KINDS; k++) {
		char text[64];

		if (!card->objects[k])
			continue;
		snprintf(text, sizeof(text), "%d objects of kind %d are left", card->objects[k], k);
		fault(call, text);
		card->objects[k] = 0;
	}
	if (card->dark) {
		fault(call, card->darkness);
		card->dark = 0;
	}
	if (card->ready || card->root != CARD_NONE || card->no_kernel_rules)
		fault(call, "rules are left in the card");
}

/* Whether all went well; a step that did not must have said why. */
static bool step(unsigned int call, int status)
{
	if (status && !strlen(dpuflow_doca_error()))
		fault(call, "it fails without a sentence");
	return !status;
}

static bool session(unsigned int call, const struct dpuflow_doca_options *options)
{
	static uint8_t room[1 << 16];
	struct dpuflow_doca_counters counters;
	dpuflow_doca *made;
	bool well = step(call, dpuflow_doca_open(options, &made));

	if (!well)
		return false;
	well &= step(call, dpuflow_doca_poll(made, room, sizeof(room)));
	well &= step(call, dpuflow_doca_count(made, &counters));
	well &= step(call, dpuflow_doca_stop(made));
	well &= step(call, dpuflow_doca_count(made, &counters));
	well &= step(call, dpuflow_doca_close(made));
	return well;
}

int main(int count, char **words)
{
	struct dpuflow_doca_options options = {
		.abi = DPUFLOW_DOCA_ABI,
		.bytes = sizeof(options),
		.device = "0000:03:00.0",
		.peer = "hpf",
		.protocols = DPUFLOW_DOCA_ROCE | DPUFLOW_DOCA_TCP,
		.sample = 1,
		.snaplen = 128,
		.frame = 9216,
		.ring = 1 << 20,
	};
	struct dpuflow_doca_facts facts;
	unsigned int calls, harmless;

	if (count < 2)
		return 2;
	if (count > 2)
		snprintf(options.copy_to, sizeof(options.copy_to), "%s", words[2]);
	setenv("DPUFLOW_SIM_CARD", words[1], 1);
	if (getenv("DPUFLOW_DRIVE_ONCE"))
		return !session(0, &options);
	card = card_open(words[1], true);
	if (!card)
		return 2;
	dpuflow_doca_describe(&facts);
	for (options.method = facts.mirror ? DPUFLOW_DOCA_MIRROR : DPUFLOW_DOCA_FLOOD;
	     options.method <= (facts.flooding ? DPUFLOW_DOCA_FLOOD : DPUFLOW_DOCA_MIRROR); options.method++) {
		harmless = 0;
		card->calls = 0;
		if (!session(0, &options))
			fault(0, "nothing fails, and yet");
		check(0);
		calls = card->calls;
		for (unsigned int k = 1; k <= calls; k++) {
			card->calls = 0;
			card->fail_at = k;
			harmless += session(k, &options);
			card->fail_at = 0;
			check(k);
			if (!session(k, &options))
				fault(k, "afterwards nothing works");
			check(k);
		}
		printf("%s: %u calls, of which %u may fail\n",
		       options.method == DPUFLOW_DOCA_MIRROR ? "mirror" : "flood", calls, harmless);
	}
	card_close(card);
	return faults != 0;
}
