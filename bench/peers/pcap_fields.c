/* Peer P: reads a capture with libpcap, decodes each RoCEv2 packet's fields, sums them.
 *
 * usage: pcap_fields FILE
 * prints: packets, checksum (see bench/checksum.py), CPU nanoseconds of the reading, libpcap's name.
 */
#include <pcap/pcap.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static uint32_t be16(const uint8_t *p) { return (uint32_t)p[0] << 8 | p[1]; }
static uint32_t be24(const uint8_t *p) { return (uint32_t)p[0] << 16 | (uint32_t)p[1] << 8 | p[2]; }
static uint32_t be32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return __builtin_bswap32(v); }

/* Bytes between BTH and payload of the RC opcodes and CNP. */
static const uint8_t extended[256] = {
    [0x03] = 4,  [0x05] = 4,  [0x06] = 16, [0x09] = 4,  [0x0a] = 16, [0x0b] = 20, [0x0c] = 16, [0x0d] = 4, [0x0f] = 4,
    [0x10] = 4,  [0x11] = 4,  [0x12] = 12, [0x13] = 28, [0x14] = 28, [0x16] = 4,  [0x17] = 4,  [0x81] = 16,
};

static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int main(int argc, char **argv)
{
    char error[PCAP_ERRBUF_SIZE];
    uint64_t start = cpu_ns(), packets = 0, sum = 0;
    struct pcap_pkthdr *h;
    const uint8_t *p;
    pcap_t *in;
    int rc;

    if (argc != 2)
        return 2;
    in = pcap_open_offline_with_tstamp_precision(argv[1], PCAP_TSTAMP_PRECISION_NANO, error);
    if (!in) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    while ((rc = pcap_next_ex(in, &h, &p)) == 1) {
        uint64_t time, ends, ports, bth, rest;
        uint32_t ip, pad, payload;
        const uint8_t *udp, *b;

        if (h->caplen < 14 + 20 + 8 + 12 || be16(p + 12) != 0x0800 || p[14 + 9] != 17)
            continue;
        ip = (p[14] & 15u) * 4;
        if (h->caplen < 14 + ip + 8 + 12)
            continue;
        udp = p + 14 + ip;
        if (be16(udp + 2) != 4791)
            continue;
        b = udp + 8;
        pad = b[1] >> 4 & 3;
        payload = be16(udp + 4) - 8 - 12 - extended[b[0]] - pad - 4;
        time = (uint64_t)h->ts.tv_sec * 1000000000u + (uint64_t)h->ts.tv_usec;
        ends = (uint64_t)be32(p + 26) << 32 | be32(p + 30);
        ports = (uint64_t)be16(udp) << 48 | (uint64_t)be16(udp + 2) << 32 | h->len;
        /* flags: AckReq, solicited event, MigReq, pad count, at the places of dpuflow's BthFlag */
        bth = (uint64_t)be24(b + 5) << 40 | (uint64_t)be24(b + 9) << 16 | (uint64_t)b[0] << 8 |
              (b[8] >> 7 | (b[1] >> 7) << 3 | (b[1] >> 6 & 1) << 4 | pad << 5);
        rest = (uint64_t)(p[15] & 3) << 32 | payload;
        sum += (2 * packets + 1) * (time + 3 * ends + 5 * ports + 7 * bth + 11 * rest);
        packets++;
    }
    pcap_close(in);
    printf("%llu %016llx %llu %s\n", (unsigned long long)packets, (unsigned long long)sum,
           (unsigned long long)(cpu_ns() - start), pcap_lib_version());
    return rc == PCAP_ERROR_BREAK ? 0 : 1;
}
