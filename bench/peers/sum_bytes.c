/* Peer S: maps a file and sums its bytes, eight at a time: the least that reading can cost.
 *
 * usage: sum_bytes FILE
 * prints: bytes, sum, CPU nanoseconds with a fresh mapping, and again with the same mapping touched (S').
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t sum_words(const uint64_t *word, size_t words)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < words; i++)
        sum += word[i];
    return sum;
}

int main(int argc, char **argv)
{
    uint64_t start = cpu_ns(), first, second, sum, again;
    struct stat st;
    const uint64_t *map;
    int fd;

    if (argc != 2 || (fd = open(argv[1], O_RDONLY)) < 0 || fstat(fd, &st) < 0)
        return 1;
    map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED)
        return 1;
    madvise((void *)map, (size_t)st.st_size, MADV_SEQUENTIAL);
    sum = sum_words(map, (size_t)st.st_size / 8);
    first = cpu_ns();
    again = sum_words(map, (size_t)st.st_size / 8);
    second = cpu_ns();
    printf("%llu %016llx %llu %llu\n", (unsigned long long)st.st_size, (unsigned long long)sum,
           (unsigned long long)(first - start), (unsigned long long)(second - first));
    return sum == again ? 0 : 1;
}
