/* SPDX-License-Identifier: GPL-2.0-only */
/* Made from dpuflow/schema/ring.py by `make headers`: change it there. */
#ifndef DPUFLOW_SCHEMA_H
#define DPUFLOW_SCHEMA_H

#define DPUFLOW_SCHEMA 0x0dda5425U
#define DPUFLOW_ROCE_V2_PORT 4791
#define DPUFLOW_CNP_OPCODE 0x81
#define DPUFLOW_MESSAGE_ENDS 0x00c18f3cU
#define DPUFLOW_MESSAGE_DATA 0x00c1efffU
#define DPUFLOW_MESSAGE_MIDDLES 0x00004082U
#define DPUFLOW_RUN_PACKETS 64
#define DPUFLOW_RUN_NS 1000000
#define DPUFLOW_RUN_HEAD 104
#define DPUFLOW_MAX_FLOWS 65536
#define DPUFLOW_TRANSPORTS 0x2fU
#define DPUFLOW_ETHERTYPE_IPV4 0x0800
#define DPUFLOW_ETHERTYPE_IPV6 0x86dd
#define DPUFLOW_ETHERTYPE_VLAN 0x8100
#define DPUFLOW_ETHERTYPE_QINQ 0x88a8
#define DPUFLOW_ETHERTYPE_ROCE_V1 0x8915
#define DPUFLOW_ETHERTYPE_MAC_CONTROL 0x8808
#define DPUFLOW_MAX_HOSTS 8
#define DPUFLOW_MAX_PORTS 8
#define DPUFLOW_MAX_QPS 16
#define DPUFLOW_MAX_VLANS 8
#define DPUFLOW_CELL_RECORD 152
#define DPUFLOW_PHC_SPAN_NS 68719476736
#define DPUFLOW_CLASS_0 64
#define DPUFLOW_CLASS_1 128
#define DPUFLOW_CLASS_2 256
#define DPUFLOW_CLASS_3 1024
#define DPUFLOW_CLASS_4 4096
#define DPUFLOW_CLASS_5 16384
#define DPUFLOW_CLASS_6 65536
#define DPUFLOW_CLASS_7 262144

enum dpuflow_protocol {
	DPUFLOW_PROTOCOL_ROCE_V2 = 1,
	DPUFLOW_PROTOCOL_ROCE_V1 = 2,
	DPUFLOW_PROTOCOL_TCP = 4,
	DPUFLOW_PROTOCOL_PAUSE = 8,
	DPUFLOW_PROTOCOL_OTHER = 16,
};

enum dpuflow_direction {
	DPUFLOW_DIRECTION_UNKNOWN = 0,
	DPUFLOW_DIRECTION_INBOUND = 1,
	DPUFLOW_DIRECTION_OUTBOUND = 2,
};

enum dpuflow_ring {
	DPUFLOW_RING_PACKET = 0,
	DPUFLOW_RING_RUN = 1,
};

/* What stands before a packet's bytes in the ring. */
struct dpuflow_ring_packet {
	__u64 time_ns; /* ns: the kernel's monotonic clock plus settings.clock_ns */
	__u32 wire_len; /* B: length on the wire, VLAN tag included */
	__u32 captured; /* B: bytes that follow */
	__u32 flow_hash; /* hash of addresses and QP or ports, 0 for neither RoCE nor TCP */
	__u8 iface; /* number of the interface, settings.iface */
	__u8 direction; /* Direction */
	__u8 ends; /* 1 where the packet ends a RoCE message */
	__u8 kind; /* RingKind */
};
_Static_assert(sizeof(struct dpuflow_ring_packet) == 24, "ring_packet");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_packet, time_ns) == 0, "ring_packet.time_ns");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_packet, wire_len) == 8, "ring_packet.wire_len");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_packet, captured) == 12, "ring_packet.captured");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_packet, flow_hash) == 16, "ring_packet.flow_hash");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_packet, iface) == 20, "ring_packet.iface");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_packet, direction) == 21, "ring_packet.direction");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_packet, ends) == 22, "ring_packet.ends");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_packet, kind) == 23, "ring_packet.kind");

/* What follows RING_PACKET where that stands for a run of MIDDLE packets with consecutive PSNs, and stands before the headers of a packet of the same flow; time_ns and wire_len are the last packet's. */
struct dpuflow_ring_run {
	__u64 first_ns; /* ns: the first packet's time_ns */
	__u32 psn; /* the first packet's PSN */
	__u32 count; /* packets: packets in the run */
	__u32 marked; /* packets: those of them that were marked CE */
	__u8 opcode; /* their BTH opcode */
	__u8 bth_at; /* B: where the BTH stands in the headers */
	__u8 ip_at; /* B: where the IP header stands */
	__u8 reserved; /* 0 */
};
_Static_assert(sizeof(struct dpuflow_ring_run) == 24, "ring_run");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_run, first_ns) == 0, "ring_run.first_ns");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_run, psn) == 8, "ring_run.psn");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_run, count) == 12, "ring_run.count");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_run, marked) == 16, "ring_run.marked");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_run, opcode) == 20, "ring_run.opcode");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_run, bth_at) == 21, "ring_run.bth_at");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_run, ip_at) == 22, "ring_run.ip_at");
_Static_assert(__builtin_offsetof(struct dpuflow_ring_run, reserved) == 23, "ring_run.reserved");

/* What became of each packet that an interface handed over, one such row per CPU; their sum was seen, the last one apart. */
struct dpuflow_counters {
	__u64 captured; /* packets: put into the ring */
	__u64 folded; /* packets: counted into a run in the ring, in messages mode */
	__u64 not_wanted; /* packets: left out by the filters */
	__u64 sampled_out; /* packets: left out by sampling */
	__u64 fragment; /* packets: later IP fragments, whose ports and QP are elsewhere; left out */
	__u64 cut; /* packets: too short for the headers they claim to have; left out */
	__u64 ring_full; /* packets: lost: the ring had no room */
	__u64 unreadable; /* packets: lost: the kernel would not give their bytes */
	__u64 no_stamp; /* packets: of them all: the NIC should have stamped them, and the kernel did */
};
_Static_assert(sizeof(struct dpuflow_counters) == 72, "counters");
_Static_assert(__builtin_offsetof(struct dpuflow_counters, captured) == 0, "counters.captured");
_Static_assert(__builtin_offsetof(struct dpuflow_counters, folded) == 8, "counters.folded");
_Static_assert(__builtin_offsetof(struct dpuflow_counters, not_wanted) == 16, "counters.not_wanted");
_Static_assert(__builtin_offsetof(struct dpuflow_counters, sampled_out) == 24, "counters.sampled_out");
_Static_assert(__builtin_offsetof(struct dpuflow_counters, fragment) == 32, "counters.fragment");
_Static_assert(__builtin_offsetof(struct dpuflow_counters, cut) == 40, "counters.cut");
_Static_assert(__builtin_offsetof(struct dpuflow_counters, ring_full) == 48, "counters.ring_full");
_Static_assert(__builtin_offsetof(struct dpuflow_counters, unreadable) == 56, "counters.unreadable");
_Static_assert(__builtin_offsetof(struct dpuflow_counters, no_stamp) == 64, "counters.no_stamp");

/* Read-only constants of a loaded program; the verifier removes the code that they rule out. */
struct dpuflow_settings {
	__u64 clock_ns; /* ns: added to the monotonic clock: wall time at the start of the capture */
	__u64 host_hi[8]; /* hosts to capture, upper half as in ENDPOINT */
	__u64 host_lo[8]; /* hosts to capture, lower half */
	__u32 schema; /* the layout's number: a program made for another one is refused */
	__u32 snaplen; /* B: bytes to keep of a packet */
	__u32 protocols; /* Protocol bits */
	__u32 hosts; /* how many hosts are listed; 0: all */
	__u32 ports; /* how many TCP ports are listed; 0: all */
	__u32 qps; /* how many QPs are listed; 0: all */
	__u32 vlans; /* how many VLANs are listed; 0: all */
	__u32 sample; /* of 2^32 pairs of hosts, those whose hash is below are left out; 0: none, ever */
	__u32 qp[16]; /* destination QPs to capture */
	__u16 port[8]; /* TCP ports to capture, either end */
	__u16 vlan[8]; /* outer VLAN ids to capture */
	__u32 iface; /* number of the interface in records */
	__u32 cell_mask; /* B: size of each CPU's own ring minus 1; 0: the kernel's ring buffer alone */
	__u32 ordered; /* 1 where the processor does not reorder stores: a plain one publishes a record */
	__u32 atomic; /* 1 where the kernel has atomic operations that give back what was there */
	__u32 hardware; /* 1 where the NIC stamps what comes, with the clock of PHC */
	__u32 reserved; /* 0 */
};
_Static_assert(sizeof(struct dpuflow_settings) == 288, "settings");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, clock_ns) == 0, "settings.clock_ns");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, host_hi) == 8, "settings.host_hi");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, host_lo) == 72, "settings.host_lo");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, schema) == 136, "settings.schema");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, snaplen) == 140, "settings.snaplen");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, protocols) == 144, "settings.protocols");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, hosts) == 148, "settings.hosts");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, ports) == 152, "settings.ports");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, qps) == 156, "settings.qps");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, vlans) == 160, "settings.vlans");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, sample) == 164, "settings.sample");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, qp) == 168, "settings.qp");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, port) == 232, "settings.port");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, vlan) == 248, "settings.vlan");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, iface) == 264, "settings.iface");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, cell_mask) == 268, "settings.cell_mask");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, ordered) == 272, "settings.ordered");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, atomic) == 276, "settings.atomic");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, hardware) == 280, "settings.hardware");
_Static_assert(__builtin_offsetof(struct dpuflow_settings, reserved) == 284, "settings.reserved");

/* Which pairs of hosts are left out; user space changes it while packets pass. */
struct dpuflow_sampling {
	__u32 below; /* of 2^32 pairs of hosts, those whose hash is below */
	__u32 reserved; /* 0 */
};
_Static_assert(sizeof(struct dpuflow_sampling) == 8, "sampling");
_Static_assert(__builtin_offsetof(struct dpuflow_sampling, below) == 0, "sampling.below");
_Static_assert(__builtin_offsetof(struct dpuflow_sampling, reserved) == 4, "sampling.reserved");

/* How the NIC's clock stands to the kernel's monotonic one, two times, of which one is being written. */
struct dpuflow_phc {
	__u64 which; /* 0 or 1: the half to use */
	__u64 nic_0; /* ns: the NIC's clock when both were read */
	__u64 time_0; /* ns: the monotonic clock then */
	__u64 rate_0; /* 2^-32: how much faster that one runs, signed */
	__u64 nic_1; /* ns: the NIC's clock when both were read */
	__u64 time_1; /* ns: the monotonic clock then */
	__u64 rate_1; /* 2^-32: how much faster that one runs, signed */
};
_Static_assert(sizeof(struct dpuflow_phc) == 56, "phc");
_Static_assert(__builtin_offsetof(struct dpuflow_phc, which) == 0, "phc.which");
_Static_assert(__builtin_offsetof(struct dpuflow_phc, nic_0) == 8, "phc.nic_0");
_Static_assert(__builtin_offsetof(struct dpuflow_phc, time_0) == 16, "phc.time_0");
_Static_assert(__builtin_offsetof(struct dpuflow_phc, rate_0) == 24, "phc.rate_0");
_Static_assert(__builtin_offsetof(struct dpuflow_phc, nic_1) == 32, "phc.nic_1");
_Static_assert(__builtin_offsetof(struct dpuflow_phc, time_1) == 40, "phc.time_1");
_Static_assert(__builtin_offsetof(struct dpuflow_phc, rate_1) == 48, "phc.rate_1");

/* How the wall clock stands to the kernel's monotonic one; user space writes it when somebody sets it. */
struct dpuflow_wall {
	__u64 real_ns; /* ns: CLOCK_REALTIME minus the monotonic clock; 0: stamps in wall time are not taken */
};
_Static_assert(sizeof(struct dpuflow_wall) == 8, "wall");
_Static_assert(__builtin_offsetof(struct dpuflow_wall, real_ns) == 0, "wall.real_ns");

#endif
