/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random inputs for a libFuzzer target without libFuzzer: main SECONDS [SEED],
 * or main FILE; and the DOCA that either is linked to.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <doca_error.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

const char *doca_error_get_name(doca_error_t error)
{
	(void)error;
	return "";
}

const char *doca_error_get_descr(doca_error_t error)
{
	(void)error;
	return "";
}

#ifndef LIBFUZZER
static int replay(FILE *file)
{
	uint8_t data[4096];

	LLVMFuzzerTestOneInput(data, fread(data, 1, sizeof(data), file));
	return fclose(file);
}

int main(int count, char **words)
{
	FILE *file = count > 1 ? fopen(words[1], "rb") : NULL;
	time_t until = time(NULL) + (count > 1 ? atoi(words[1]) : 10);
	unsigned int seed = count > 2 ? strtoul(words[2], NULL, 10) : 1;
	unsigned long inputs = 0;

	if (file)
		return replay(file);
	for (; time(NULL) < until; inputs++, seed++) {
		unsigned int draw = seed;
		size_t size = rand_r(&draw) % 512;
		uint8_t *data = malloc(size + 1); /* on the heap, so that a look beyond its end is seen */

		for (size_t k = 0; k < size; k++)
			data[k] = rand_r(&draw) >> 7;
		LLVMFuzzerTestOneInput(data, size);
		free(data);
	}
	printf("ring: %lu inputs, up to seed %u\n", inputs, seed);
	return 0;
}
#endif
