/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The compiled kernels through their C entries: random and half-right packets through the filter (packets.judge_one), each
 * at the very end of a page that nothing follows, so that one byte read beyond it ends the program.
 *
 *     fuzz_kernels LIBRARY SECONDS [SEED]
 *
 * With -fsanitize=fuzzer -DLIBFUZZER it is a target of libFuzzer, which KERNELS names the library to (tools/fuzz.sh). The
 * library itself tells nothing of what was reached: half of the inputs are therefore made as without libFuzzer.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define WORDS 64 /* more than P_SIZE of kernels/packets.py; what a filter lists is left empty */

/* What compiled code reads of a NumPy array (numpy/ndarraytypes.h, PyArrayObject_fields), behind PyObject_HEAD. */
struct array {
	uint64_t head[2];
	void *data;
	int dimensions;
	int64_t *shape, *strides;
	void *base, *descr;
	int flags;
};

typedef int (*entry)(int64_t *result, void **error, int64_t *words);

static entry judge;
static uint8_t *end_of_page; /* the packet ends here */
static unsigned long inputs;

static struct array of(void *data, int64_t *shape, int64_t *stride)
{
	struct array made = { { 1 << 20, 0 }, data, 1, shape, stride, NULL, NULL, 0x0501 };

	return made;
}

static void prepare(const char *path)
{
	void *library = dlopen(path, RTLD_NOW);
	uint8_t *pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	judge = library ? (entry)dlsym(library, "dpuflow_kernels_packets_judge_one") : NULL;
	if (!judge || pages == MAP_FAILED || mprotect(pages + PAGE, PAGE, PROT_NONE)) {
		fprintf(stderr, "fuzz_kernels: %s: no kernels\n", library ? path : dlerror());
		exit(2);
	}
	end_of_page = pages + PAGE;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static int64_t wanted[WORDS], found[2];
	static int64_t one = 1, eight = 8, words_shape = WORDS, found_shape = 2;
	int64_t shape, words[6], result = -1;
	void *error = NULL;

	if (!judge)
		prepare(getenv("KERNELS"));
	if (size < 2 || size - 2 > PAGE)
		return 0;
	wanted[0] = data[0] & 31 ? data[0] & 31 : 31; /* P_PROTOCOLS */
	wanted[1] = 65535; /* P_SNAPLEN */
	shape = size - 2;
	memcpy(end_of_page - shape, data + 2, shape);
	struct array packet = of(end_of_page - shape, &shape, &one);
	struct array filter = of(wanted, &words_shape, &eight);
	struct array told = of(found, &found_shape, &eight);

	words[0] = (int64_t)&packet;
	words[1] = 0;
	words[2] = shape;
	words[3] = data[1] & 1 ? 0x10000 | data[1] : 0;
	words[4] = (int64_t)&filter;
	words[5] = (int64_t)&told;
	if (judge(&result, &error, words) || result < 0 || result > 4)
		abort();
	inputs++;
	return 0;
}

static uint64_t state;

static uint32_t draw(void)
{
	state = state * 6364136223846793005u + 1442695040888963407u;
	return state >> 33;
}

/* Most begin as packets that carry something: else hardly any would come beyond its Ethernet type. */
static size_t make(uint8_t *data)
{
	static const uint16_t types[] = { 0x0800, 0x86DD, 0x8100, 0x88A8, 0x8915, 0x8808 };
	static const uint8_t protocols[] = { 17, 6, 44, 1 };
	size_t size = 2 + draw() % 200, at = 2 + 12;

	for (size_t k = 0; k < size; k++)
		data[k] = draw();
	for (int tags = 0; tags < 3 && size > at + 24 && draw() % 16; tags++) {
		uint16_t type = types[draw() % 6];

		data[at] = type >> 8;
		data[at + 1] = type;
		if (type == 0x0800) {
			if (draw() % 4)
				data[at + 2] = 0x40 | (5 + draw() % 11 * (draw() % 4 == 0)), data[at + 8] = 0, data[at + 9] = 0;
			data[at + 11] = protocols[draw() % 4];
			if (draw() % 4 && size > at + 2 + 24)
				data[at + 2 + 22] = 4791 >> 8, data[at + 2 + 23] = 4791 & 255;
		}
		if (type == 0x86DD)
			data[at + 8] = protocols[draw() % 4];
		if (type != 0x8100 && type != 0x88A8)
			break;
		at += 4;
	}
	return size;
}

#ifdef LIBFUZZER
int LLVMFuzzerInitialize(int *count, char ***words);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned int seed);

int LLVMFuzzerInitialize(int *count, char ***words)
{
	const char *path = getenv("KERNELS");

	(void)count;
	(void)words;
	prepare(path ? path : "");
	return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned int seed)
{
	state = seed;
	return draw() % 2 && most >= 256 ? make(data) : LLVMFuzzerMutate(data, size, most);
}
#else
static void fell(int number)
{
	fprintf(stderr, "fuzz_kernels: signal %d at input %lu\n", number, inputs);
	_exit(1);
}

int main(int count, char **words)
{
	uint8_t data[256];

	if (count < 3) {
		fprintf(stderr, "fuzz_kernels LIBRARY SECONDS [SEED]\n");
		return 2;
	}
	prepare(words[1]);
	signal(SIGSEGV, fell);
	signal(SIGABRT, fell);
	state = count > 3 ? strtoul(words[3], NULL, 10) : 1;
	for (time_t until = time(NULL) + atoi(words[2]); time(NULL) < until;)
		for (int k = 0; k < 1000; k++)
			LLVMFuzzerTestOneInput(data, make(data));
	printf("kernels: %lu packets through the filter\n", inputs);
	return 0;
}
#endif
