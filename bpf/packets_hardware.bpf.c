// SPDX-License-Identifier: GPL-2.0-only
/* packets.bpf.c for XDP with the NIC's stamps: bound to a device, and for kernels with BTF alone. */
#define DPUFLOW_HARDWARE
#include "packets.bpf.c"
