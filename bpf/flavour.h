/* SPDX-License-Identifier: GPL-2.0-only */
/* The same program for libbpf (an object made beforehand) and for bcc (compiled where it runs).
 * Only the kernel's user API is touched, so an object fits kernels without BTF and all little-endian
 * processors. bcc cannot set constants of a loaded program: user space writes them as text, in
 * DPUFLOW_SETTINGS, before it compiles. */
#ifndef DPUFLOW_FLAVOUR_H
#define DPUFLOW_FLAVOUR_H

#ifdef DPUFLOW_BCC
#include <uapi/linux/bpf.h>
#include <uapi/linux/pkt_cls.h>
#else
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#endif

#include "dpuflow_schema.h"

#ifdef DPUFLOW_BCC

#define SECTION(name)
static const struct dpuflow_settings settings = DPUFLOW_SETTINGS;
/* User space has made the maps, as bcc cannot share a ring between programs that it compiles apart. */
#define MAP(fd) bpf_pseudo_fd(1, fd)
#define RESERVE(size) bpf_ringbuf_reserve((void *)MAP(DPUFLOW_RING_FD), size, 0)
#define SUBMIT(record) bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP)
#define DISCARD(record) bpf_ringbuf_discard(record, BPF_RB_NO_WAKEUP)
#define COUNTERS(zero) bpf_map_lookup_elem_(MAP(DPUFLOW_COUNTERS_FD), &zero)
#define CELL(cpu) bpf_map_lookup_elem_(MAP(DPUFLOW_CELLS_FD), &cpu)
#define SAMPLING(zero) bpf_map_lookup_elem_(MAP(DPUFLOW_SAMPLING_FD), &zero)
#define PHC(zero) 0
#ifdef DPUFLOW_WALL_FD
#define WALL(zero) bpf_map_lookup_elem_(MAP(DPUFLOW_WALL_FD), &zero)
#else
#define WALL(zero) 0
#endif

#else

#define SECTION(name) SEC(name)
char _license[] SEC("license") = "GPL";

/* Set before loading. A map of its own, so that it holds this struct and nothing else. */
const volatile struct dpuflow_settings settings SEC(".rodata.settings") = { .schema = DPUFLOW_SCHEMA };

/* Packets on their way to user space that each CPU's own ring has no room for, and those too long for it;
 * user space sets the size and shares one between the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} ring SEC(".maps");

/* 0 -> what became of the packets; per CPU, as several count at the same time. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dpuflow_counters);
} counters SEC(".maps");

/* CPU -> its own ring, struct cell; mapped into user space, which makes it and sets its size. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, 4096);
} cells SEC(".maps");

/* 0 -> how the NIC's clock stands to the kernel's; written by user space once a second. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dpuflow_phc);
} phc SEC(".maps");

/* 0 -> which pairs of hosts are left out; mapped into user space, which may change it at any time. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dpuflow_sampling);
} sampling SEC(".maps");

/* 0 -> how the wall clock stands to the kernel's monotonic one; written by user space. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dpuflow_wall);
} wall SEC(".maps");

#define RESERVE(size) bpf_ringbuf_reserve(&ring, size, 0)
#define SUBMIT(record) bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP)
#define DISCARD(record) bpf_ringbuf_discard(record, BPF_RB_NO_WAKEUP)
#define COUNTERS(zero) bpf_map_lookup_elem(&counters, &zero)
#define CELL(cpu) bpf_map_lookup_elem(&cells, &cpu)
#define SAMPLING(zero) bpf_map_lookup_elem(&sampling, &zero)
#define PHC(zero) bpf_map_lookup_elem(&phc, &zero)
#define WALL(zero) bpf_map_lookup_elem(&wall, &zero)

#endif
#endif
