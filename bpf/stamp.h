/* SPDX-License-Identifier: GPL-2.0-only */
/* When a packet came: by the NIC's clock where it stamps, by the kernel's stamp where it has made one, else by the
 * kernel's clock when the program runs. */
#ifndef DPUFLOW_STAMP_H
#define DPUFLOW_STAMP_H

#include "store.h"

#ifdef DPUFLOW_HARDWARE
/* At XDP the stamp is asked of the driver: a program for that is bound to one device, and needs the kernel's BTF. */
extern int bpf_xdp_metadata_rx_timestamp(const struct xdp_md *xdp, __u64 *stamp) __ksym;
#define XDP_STAMP(xdp, stamp) bpf_xdp_metadata_rx_timestamp(xdp, stamp)
#else
#define XDP_STAMP(xdp, stamp) -1
#endif

/* A stamp of the NIC's in the kernel's monotonic clock; 0 where that cannot be. */
static __always_inline __u64 from_nic(__u64 stamp)
{
	__u64 since, time, rate;
	struct dpuflow_phc *clock;
	__u32 zero = 0;

	clock = PHC(zero);
	if (!clock || !stamp)
		return 0;
	since = stamp - (clock->which ? clock->nic_1 : clock->nic_0);
	time = clock->which ? clock->time_1 : clock->time_0;
	rate = clock->which ? clock->rate_1 : clock->rate_0;
	if (since + DPUFLOW_PHC_SPAN_NS > 2ULL * DPUFLOW_PHC_SPAN_NS)
		return 0;
	return time + since + ((__s64)since * (__s64)rate >> 32);
}

/* The stamp that the kernel gives to what comes in, while some program on the host asks for that (chronyd,
 * systemd-timesyncd, ptp4l), in its monotonic clock; 0 where there is none. Reading the clock again would take most
 * of this program's time. At tc alone, and inbound: what goes out has the time it is to leave in the same field. */
static __always_inline __u64 from_kernel(void *ctx)
{
	__u64 stamp = ((struct __sk_buff *)ctx)->tstamp;
	struct dpuflow_wall *clock;
	__u32 zero = 0;

	if (!stamp)
		return 0;
	clock = WALL(zero);
	if (!clock || !clock->real_ns)
		return 0;
	return stamp - clock->real_ns;
}

static __always_inline __u64 stamp(void *ctx, int xdp, __u8 direction, struct dpuflow_counters *count)
{
	if (settings.hardware && direction == DPUFLOW_DIRECTION_INBOUND) {
		__u64 nic = 0, time = 0;

		if (!xdp)
			nic = ((struct __sk_buff *)ctx)->hwtstamp;
		else if (XDP_STAMP(ctx, &nic))
			nic = 0;
		time = from_nic(nic);
		if (time)
			return time;
		count->no_stamp++;
	}
	if (!xdp && direction == DPUFLOW_DIRECTION_INBOUND) {
		__u64 time = from_kernel(ctx);

		if (time)
			return time;
	}
	return bpf_ktime_get_ns();
}

#endif
