// SPDX-License-Identifier: GPL-2.0-only
/* What bench/live.py measures with: a source of packets, and what a time stamp costs. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "GPL";

__u32 psn;
__u64 stamp;

/* On frames that the kernel makes (bpf_prog_test_run, BPF_F_TEST_XDP_LIVE_FRAMES): the next PSN, and up the stack. */
SEC("xdp")
int source(struct xdp_md *xdp)
{
	__u8 *data = (void *)(long)xdp->data;
	__u32 next = psn++;

	if (data + 60 > (__u8 *)(long)xdp->data_end)
		return XDP_DROP;
	data[51] = next >> 16;
	data[52] = next >> 8;
	data[53] = next;
	return XDP_PASS;
}

#define STAMP(name, value)                                                                                     \
	SEC("xdp") int name(struct xdp_md *xdp)                                                                \
	{                                                                                                      \
		stamp = (value);                                                                               \
		return XDP_PASS;                                                                               \
	}

STAMP(no_stamp, 1)
STAMP(monotonic, bpf_ktime_get_ns())
STAMP(boottime, bpf_ktime_get_boot_ns())
STAMP(tai, bpf_ktime_get_tai_ns())
STAMP(coarse, bpf_ktime_get_coarse_ns())
