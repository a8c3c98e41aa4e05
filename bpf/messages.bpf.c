// SPDX-License-Identifier: GPL-2.0-only
/* As packets.bpf.c, but the packets in the middle of a RoCE message are folded into runs of consecutive PSNs:
 * at 400 Gb/s and 4 KiB MTU that leaves a sixtieth of the records. FIRST, LAST, ONLY, requests, ACKs, NAKs, CNPs,
 * and whatever comes out of turn, go into the ring as they are, behind the run that they end. */
#include "store.h"

struct run_key {
	__u64 src_hi, src_lo, dst_hi, dst_lo;
	__u32 qp;
	__u32 kind; /* direction, and where the BTH stands: RoCEv1 and v2 are flows apart */
};

/* What the map knows it by: eight bytes are found in half the time that forty take. Whose run it is, is looked at
 * once it is held. */
static __always_inline __u64 digest(const struct run_key *key)
{
	__u64 hash = (key->src_lo ^ key->src_lo >> 29) * 0x9e3779b97f4a7c15ULL + key->src_hi;

	hash = (hash ^ hash >> 32) * 0xbf58476d1ce4e5b9ULL + key->dst_lo;
	hash = (hash ^ hash >> 29) * 0x9e3779b97f4a7c15ULL + (key->dst_hi ^ ((__u64)key->qp << 32 | key->kind));
	return hash ^ hash >> 31;
}

struct run {
	__u64 first_ns, last_ns;
	__u32 psn, count, marked;
	__u32 wire_len;
	__u32 next_psn;
	__u32 flow_hash;
	__u32 idle; /* flushes that found nothing */
	__u8 opcode, bth_at, ip_at, direction;
	struct bpf_spin_lock lock; /* a flow's packets may come on several CPUs: with settings.atomic, `busy` holds it */
	__u32 busy; /* 1 while somebody works on it */
	__u32 closed; /* about to be removed: nothing may be folded into it any more */
	struct run_key flow;
	__u8 head[DPUFLOW_RUN_HEAD]; /* headers of the flow's first packet, which user space fills in */
};

/* Digest of a flow of one direction -> its run. Plain hash: an LRU would forget runs unseen. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DPUFLOW_MAX_FLOWS);
	__type(key, __u64);
	__type(value, struct run);
} runs SEC(".maps");

#define HOLD_TRIES 8 /* a run is held for some 20 ns, as long as each of these takes */

/* Take a run for oneself, for as long as no function of the kernel is called; 0 where another has it. The kernel's own
 * lock takes 40 ns, a third of this program. */
static __always_inline int hold(struct run *run)
{
	if (!settings.atomic) {
		bpf_spin_lock(&run->lock);
		return 1;
	}
#pragma unroll
	for (int k = 0; k < HOLD_TRIES; k++)
		if (!__sync_val_compare_and_swap(&run->busy, 0, 1))
			return 1;
	return 0;
}

static __always_inline void let_go(struct run *run)
{
	if (!settings.atomic) {
		bpf_spin_unlock(&run->lock);
	} else if (settings.ordered) {
		asm volatile("" ::: "memory");
		*(volatile __u32 *)&run->busy = 0;
	} else { /* as in publish() */
		__u32 before = __sync_fetch_and_add(&run->busy, -1);
		asm volatile("" ::"r"(before));
	}
}

static __always_inline int same_flow(const struct run_key *a, const struct run_key *b)
{
	return a->src_lo == b->src_lo && a->dst_lo == b->dst_lo && a->qp == b->qp && a->kind == b->kind &&
	       a->src_hi == b->src_hi && a->dst_hi == b->dst_hi;
}

/* What has been taken out of a run while it was held. */
struct ended {
	__u64 first_ns, last_ns;
	__u32 psn, count, marked, wire_len;
	__u8 opcode;
};

static __always_inline void end_run(struct run *run, struct ended *ended)
{
	ended->first_ns = run->first_ns;
	ended->last_ns = run->last_ns;
	ended->psn = run->psn;
	ended->count = run->count;
	ended->marked = run->marked;
	ended->wire_len = run->wire_len;
	ended->opcode = run->opcode;
	run->count = 0;
}

#define RUN_RECORD (sizeof(struct dpuflow_ring_packet) + sizeof(struct dpuflow_ring_run) + DPUFLOW_RUN_HEAD)
_Static_assert(RUN_RECORD <= DPUFLOW_CELL_RECORD, "a run fits where a packet does");

static __always_inline void write_run(struct dpuflow_ring_packet *record, const struct run *run,
				      const struct ended *ended)
{
	struct dpuflow_ring_run *more = (void *)(record + 1);

	record->time_ns = ended->last_ns + settings.clock_ns;
	record->wire_len = ended->wire_len;
	record->captured = run->bth_at + BTH;
	record->flow_hash = run->flow_hash;
	record->iface = settings.iface;
	record->direction = run->direction;
	record->ends = 0;
	record->kind = DPUFLOW_RING_RUN;
	more->first_ns = ended->first_ns + settings.clock_ns;
	more->psn = ended->psn;
	more->count = ended->count;
	more->marked = ended->marked;
	more->opcode = ended->opcode;
	more->bth_at = run->bth_at;
	more->ip_at = run->ip_at;
	more->reserved = 0;
	__builtin_memcpy(more + 1, run->head, DPUFLOW_RUN_HEAD);
}

/* Where the packet that ends the run will stand, and so before it: in this CPU's own ring. From user space's
 * program (`own` 0), which softirqs may interrupt, in the kernel's. */
static __always_inline void emit(const struct run *run, const struct ended *ended, struct dpuflow_counters *count,
				 int own)
{
	struct cell *cell = own ? roomy_cell() : 0;
	struct dpuflow_ring_packet *record;

	if (cell) {
		write_run(place(cell), run, ended);
		publish(cell, RUN_RECORD);
		return;
	}
	record = RESERVE(RUN_RECORD);
	if (!record) {
		count->folded -= ended->count;
		count->ring_full += ended->count;
		return;
	}
	write_run(record, run, ended);
	SUBMIT(record);
}

/* A flow's first packet: nothing to fold yet, but from now on there is. */
static __always_inline void begin(void *ctx, int xdp, __u64 hash, const struct run_key *key,
				  const struct found *found, __u8 direction, __u32 next_psn)
{
	struct run run = { .next_psn = next_psn, .flow_hash = found->flow_hash, .bth_at = found->bth_at,
			   .ip_at = found->ip_at, .direction = direction, .flow = *key };

	/* A tag that the kernel took out is not in these bytes, and need not be. */
	if (!load(ctx, xdp, 0, run.head, DPUFLOW_RUN_HEAD))
		bpf_map_update_elem(&runs, &hash, &run, BPF_NOEXIST);
}

static __always_inline void take(void *ctx, int xdp, void *data, void *data_end, const struct packet *packet,
				 const struct found *found, struct dpuflow_counters *count)
{
	struct run_key key = { found->src_hi, found->src_lo, found->dst_hi, found->dst_lo, found->qp,
			       packet->direction | found->bth_at << 8 };
	struct ended ended = {};
	__u8 word[BTH], ip[2], marked, opcode, folded = 0;
	__u32 psn, ack;
	struct run *run;
	__u64 hash;

	if (!found->bth_at || packet->tag)
		goto whole;
	if (found->bth_at == USUAL - BTH && data + USUAL <= data_end) {
		opcode = ((__u8 *)data)[USUAL - BTH];
		psn = wide32(data + USUAL - 4);
		ip[0] = ((__u8 *)data)[ETHERNET];
		ip[1] = ((__u8 *)data)[ETHERNET + 1];
	} else {
		if (load(ctx, xdp, found->bth_at, word, BTH) || load(ctx, xdp, found->ip_at, ip, 2))
			goto whole;
		opcode = word[0];
		psn = be32(word + 8);
	}
	/* An ACK is asked for by the highest bit before the PSN: such packets are seen whole. */
	ack = psn >> 31;
	psn &= 0xffffff;
	if (opcode == DPUFLOW_CNP_OPCODE || !(DPUFLOW_MESSAGE_DATA >> (opcode & 31) & 1))
		goto whole;
	hash = digest(&key);
	run = bpf_map_lookup_elem(&runs, &hash);
	if (!run) {
		begin(ctx, xdp, hash, &key, found, packet->direction, psn + 1 & 0xffffff);
		goto whole;
	}
	marked = (ip[0] >> 4 == 4 ? ip[1] & 3 : ip[1] >> 4 & 3) == 3;
	if (!hold(run))
		goto whole;
	if (run->closed || !same_flow(&run->flow, &key)) {
		let_go(run);
		goto whole;
	}
	if (DPUFLOW_MESSAGE_MIDDLES >> (opcode & 31) & 1 && psn == run->next_psn && !ack) {
		if (run->count && (run->wire_len != packet->wire_len || run->opcode != opcode ||
				   run->count >= DPUFLOW_RUN_PACKETS ||
				   packet->time_ns - run->first_ns > DPUFLOW_RUN_NS))
			end_run(run, &ended);
		if (!run->count) {
			run->first_ns = packet->time_ns;
			run->psn = psn;
			run->marked = 0;
			run->wire_len = packet->wire_len;
			run->opcode = opcode;
		}
		run->last_ns = packet->time_ns;
		run->count++;
		run->marked += marked;
		folded = 1;
	} else if (run->count) {
		end_run(run, &ended);
	}
	run->next_psn = psn + 1 & 0xffffff;
	run->idle = 0;
	let_go(run);
	if (folded)
		count->folded++;
	if (ended.count)
		emit(run, &ended, count, 1);
	if (folded)
		return;
whole:
	store(ctx, xdp, data, data_end, packet, found, count);
}

#include "programs.h"

#define IDLE_FLUSHES 60

struct flush {
	__u64 now_ns;
};

/* One run that has stood long enough; flows that have been idle for a while make room. */
static long flush_one(void *map, __u64 *key, void *value, struct flush *flush)
{
	struct dpuflow_counters *count;
	struct ended ended = {};
	__u32 zero = 0, closed;
	struct run *run;

	count = COUNTERS(zero);
	if (!count)
		return 1;
	/* Looked up again, for Linux 6.1 and before take no lock of `value` itself. */
	run = bpf_map_lookup_elem(&runs, key);
	if (!run)
		return 0;
	/* What packets are coming to is not taken from them. */
	if (run->count ? flush->now_ns - run->last_ns < DPUFLOW_RUN_NS : ++run->idle <= IDLE_FLUSHES)
		return 0;
	if (!hold(run))
		return 0;
	if (run->count && flush->now_ns - run->last_ns >= DPUFLOW_RUN_NS)
		end_run(run, &ended);
	closed = run->idle > IDLE_FLUSHES && !run->count;
	run->closed = closed;
	let_go(run);
	if (ended.count)
		emit(run, &ended, count, 0);
	if (closed)
		bpf_map_delete_elem(&runs, key);
	return 0;
}

static __always_inline int flush_all(void)
{
	struct flush flush = { .now_ns = bpf_ktime_get_ns() };

	bpf_for_each_map_elem(&runs, flush_one, &flush, 0);
	return 0;
}

/* Run by user space now and then, and once more at the end. */
SECTION("syscall")
int dpuflow_flush(void *ctx)
{
	return flush_all();
}

/* The same where programs of user space may not take locks (Linux 6.1 and before): softirqs wait meanwhile. */
SECTION("tc")
int dpuflow_flush_tc(struct __sk_buff *skb)
{
	return flush_all();
}
