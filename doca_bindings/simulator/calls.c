/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What surrounds each call: failure on demand, the count of living objects, and after each call a look whether
 * production is what it was: probes through the card must come out once, where the kernel's rules send them.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim.h"

struct sim sim;
static char previous[64] = "the start";

static const struct {
	doca_error_t error;
	const char *name, *text;
} errors[] = {
	{DOCA_SUCCESS, "DOCA_SUCCESS", "Success"},
	{DOCA_ERROR_UNKNOWN, "DOCA_ERROR_UNKNOWN", "Unknown error"},
	{DOCA_ERROR_NOT_PERMITTED, "DOCA_ERROR_NOT_PERMITTED", "Operation not permitted"},
	{DOCA_ERROR_IN_USE, "DOCA_ERROR_IN_USE", "Resource already in use"},
	{DOCA_ERROR_NOT_SUPPORTED, "DOCA_ERROR_NOT_SUPPORTED", "Operation not supported"},
	{DOCA_ERROR_INVALID_VALUE, "DOCA_ERROR_INVALID_VALUE", "Invalid input"},
	{DOCA_ERROR_NO_MEMORY, "DOCA_ERROR_NO_MEMORY", "Memory allocation failure"},
	{DOCA_ERROR_NOT_FOUND, "DOCA_ERROR_NOT_FOUND", "Not found"},
	{DOCA_ERROR_BAD_STATE, "DOCA_ERROR_BAD_STATE", "Bad state"},
	{DOCA_ERROR_DRIVER, "DOCA_ERROR_DRIVER", "Driver call failure"},
	{DOCA_ERROR_FULL, "DOCA_ERROR_FULL", "Full"},
};

const char *doca_error_get_name(doca_error_t error)
{
	for (unsigned int k = 0; k < sizeof(errors) / sizeof(errors[0]); k++)
		if (errors[k].error == error)
			return errors[k].name;
	return "DOCA_ERROR";
}

const char *doca_error_get_descr(doca_error_t error)
{
	for (unsigned int k = 0; k < sizeof(errors) / sizeof(errors[0]); k++)
		if (errors[k].error == error)
			return errors[k].text;
	return "Some error";
}

/* As the real library logs why. */
doca_error_t sim_no(doca_error_t error, const char *why)
{
	if (getenv("DPUFLOW_SIM_LOG"))
		fprintf(stderr, "simulator: %s: %s\n", doca_error_get_name(error), why);
	return error;
}

void sim_made(enum kind kind)
{
	sim.card->objects[kind]++;
}

void sim_gone(enum kind kind)
{
	sim.card->objects[kind]--;
}

/* -- probes ------------------------------------------------------------------------------------ */

struct outcome {
	unsigned int ports[CARD_PORTS];
	const uint8_t *sent;
	uint32_t length;
	bool altered;
};

static void note(void *context, bool queue, unsigned int place, const uint8_t *packet, uint32_t length)
{
	struct outcome *outcome = context;

	if (queue || place >= CARD_PORTS)
		return;
	outcome->ports[place]++;
	outcome->altered |= length != outcome->length || memcmp(packet, outcome->sent, length);
}

/* RoCEv2, TCP, ARP and RoCEv2 over IPv6, short. */
static uint32_t make_probe(unsigned int number, uint8_t packet[80])
{
	uint8_t *ip = packet + 14;

	memset(packet, 0, 80);
	memset(packet, 2, 12);
	if (number == 2) {
		packet[12] = 8;
		packet[13] = 6;
		return 60;
	}
	if (number == 3) {
		packet[12] = 0x86;
		packet[13] = 0xdd;
		ip[0] = 0x60;
		ip[6] = 17;
		ip[40 + 2] = 4791 >> 8;
		ip[40 + 3] = 4791 & 255;
		return 78;
	}
	packet[12] = 8;
	ip[0] = 0x45;
	ip[9] = number ? 6 : 17;
	ip[20 + 2] = 4791 >> 8;
	ip[20 + 3] = 4791 & 255;
	return 60;
}

void sim_look(const char *name)
{
	static const uint16_t draws[] = {0, 1, 0xffff};
	struct card *card = sim.card;

	for (unsigned int k = 0; k < 4 * 2 * 3; k++) {
		unsigned int port = k / 4 % 2, expected = card_kernel_way(port);
		uint8_t packet[80];
		struct outcome outcome = {.sent = packet};

		outcome.length = make_probe(k % 4, packet);
		card_forward(card, port, packet, outcome.length, draws[k / 8], false, note, &outcome);
		if (outcome.ports[expected] == 1 && !outcome.ports[port] && !outcome.altered)
			continue;
		if (!card->dark++)
			snprintf(card->darkness, sizeof(card->darkness),
				 "after %s: probe %u from port %u came out %u times", name, k % 4, port,
				 outcome.ports[expected]);
		return;
	}
}

static void open_card(void)
{
	const char *path = getenv("DPUFLOW_SIM_CARD");

	if (sim.card)
		return;
	if (!path) {
		fprintf(stderr, "simulator: DPUFLOW_SIM_CARD names no card\n");
		abort();
	}
	snprintf(sim.path, sizeof(sim.path), "%s", path);
	sim.card = card_open(path, false);
	if (!sim.card || sim.card->magic != CARD_MAGIC) {
		fprintf(stderr, "simulator: %s is no card\n", path);
		abort();
	}
}

bool sim_call(const char *name)
{
	uint32_t number;

	open_card();
	card_lock(sim.card);
	number = ++sim.card->calls;
	sim_look(previous);
	card_unlock(sim.card);
	snprintf(previous, sizeof(previous), "%s", name);
	if (number == sim.card->die_at)
		kill(getpid(), SIGKILL);
	return number == sim.card->fail_at;
}
