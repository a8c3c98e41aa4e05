// SPDX-License-Identifier: GPL-2.0-only
/* Every wanted packet's first bytes into the ring, stamped and counted. */
#include "store.h"

static __always_inline void take(void *ctx, int xdp, void *data, void *data_end, const struct packet *packet,
				 const struct found *found, struct dpuflow_counters *count)
{
	store(ctx, xdp, data, data_end, packet, found, count);
}

#include "programs.h"
