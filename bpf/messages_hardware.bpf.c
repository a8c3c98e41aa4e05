// SPDX-License-Identifier: GPL-2.0-only
/* messages.bpf.c for XDP with the NIC's stamps: bound to a device, and for kernels with BTF alone. */
#define DPUFLOW_HARDWARE
#include "messages.bpf.c"
