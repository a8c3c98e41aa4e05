/* SPDX-License-Identifier: GPL-2.0-only */
/* Headers of one packet, and whether it is wanted. IBA volume 1 chapter 9 and annexes A16, A17. */
#ifndef DPUFLOW_PARSE_H
#define DPUFLOW_PARSE_H

#include "flavour.h"

#define HEAD 104 /* Ethernet, two VLAN tags, IPv4 with all options (60), UDP, BTH: 102, rounded up */
#define ETHERNET 14
#define BTH 12
#define USUAL 54 /* Ethernet, IPv4, UDP, BTH; TCP's header is as long as the last two */
#define TAGGED 0x10000
#define LATER_FRAGMENT 256 /* in place of the protocol */

struct head {
	__u8 byte[128]; /* HEAD rounded up to a power of two, for the verifier */
};

enum verdict { WANTED, NOT_WANTED, SAMPLED_OUT, FRAGMENT, CUT, UNUSUAL };

/* What the headers say; of RoCE all of it, of the rest the hash alone. */
struct found {
	__u64 src_hi, src_lo, dst_hi, dst_lo;
	__u32 flow_hash;
	__u32 qp;
	__u8 bth_at; /* 0: not RoCE */
	__u8 ip_at; /* of RoCEv1: where the GRH stands, which is laid out as IPv6 is */
	__u8 ends;
};

static __always_inline __u16 be16(const __u8 *at)
{
	return (__u16)at[0] << 8 | at[1];
}

static __always_inline __u32 be32(const __u8 *at)
{
	return (__u32)be16(at) << 16 | be16(at + 2);
}

static __always_inline __u64 be64(const __u8 *at)
{
	return (__u64)be32(at) << 32 | be32(at + 4);
}

/* The same of a packet's own bytes, in one load: the kernel allows those of unknown alignment where the processor
 * does (x86-64, arm64); of bytes on the stack, never. */
static __always_inline __u16 wide16(const void *at)
{
	return __builtin_bswap16(*(const __u16 *)at);
}

static __always_inline __u32 wide32(const void *at)
{
	return __builtin_bswap32(*(const __u32 *)at);
}

static __always_inline int host_listed(__u64 hi, __u64 lo)
{
#pragma unroll
	for (int k = 0; k < DPUFLOW_MAX_HOSTS; k++)
		if (k < settings.hosts && settings.host_hi[k] == hi && settings.host_lo[k] == lo)
			return 1;
	return 0;
}

static __always_inline int port_listed(__u16 port)
{
#pragma unroll
	for (int k = 0; k < DPUFLOW_MAX_PORTS; k++)
		if (k < settings.ports && settings.port[k] == port)
			return 1;
	return 0;
}

static __always_inline int qp_listed(__u32 qp)
{
#pragma unroll
	for (int k = 0; k < DPUFLOW_MAX_QPS; k++)
		if (k < settings.qps && settings.qp[k] == qp)
			return 1;
	return 0;
}

static __always_inline int vlan_listed(__u16 vlan)
{
#pragma unroll
	for (int k = 0; k < DPUFLOW_MAX_VLANS; k++)
		if (k < settings.vlans && settings.vlan[k] == vlan)
			return 1;
	return 0;
}

static __always_inline __u32 mixed(__u64 value)
{
	return (value ^ value >> 29) * 0x9e3779b97f4a7c15ULL >> 32;
}

/* Of a pair of hosts, whether sampling leaves it out. Another share of them costs user space one store; other
 * programs would cost it the verifier's time, a tenth of a second. */
static __always_inline int left_out(__u64 hosts)
{
	struct dpuflow_sampling *asked;
	__u32 zero = 0;

	if (!settings.sample)
		return 0;
	asked = SAMPLING(zero);
	return asked && mixed(hosts) < *(volatile __u32 *)&asked->below;
}

/* What is not read further: wanted only where everything is. */
static __always_inline enum verdict unless_other(enum verdict verdict)
{
	return settings.protocols & DPUFLOW_PROTOCOL_OTHER ? WANTED : verdict;
}

/* Filters on what a RoCE packet is for, and whether a message ends with it. `word`: destination QP, with
 * the byte before it. */
static __always_inline enum verdict judge_bth(__u8 opcode, __u32 word, __u64 hosts, struct found *found)
{
	__u32 qp = word & 0xffffff;

	if (settings.qps && !qp_listed(qp))
		return NOT_WANTED;
	found->flow_hash = mixed(hosts + qp) | 1;
	found->qp = qp;
	found->ends = opcode != DPUFLOW_CNP_OPCODE && DPUFLOW_MESSAGE_ENDS >> (opcode & 31) & 1;
	/* The two directions of a connection have unlike QPs: what they share is the pair of hosts. */
	if (left_out(hosts))
		return SAMPLED_OUT;
	return WANTED;
}

/* `ports`: both ports of TCP. */
static __always_inline enum verdict judge_tcp(__u32 ports, __u64 hosts, struct found *found)
{
	if (!(settings.protocols & DPUFLOW_PROTOCOL_TCP))
		return unless_other(NOT_WANTED);
	if (settings.ports && !port_listed(ports >> 16) && !port_listed(ports & 0xffff))
		return NOT_WANTED;
	found->flow_hash = mixed(hosts + ports) | 1;
	if (left_out(hosts))
		return SAMPLED_OUT;
	return WANTED;
}

static __always_inline __u64 host_pair(__u64 src_hi, __u64 src_lo, __u64 dst_hi, __u64 dst_lo)
{
	return (src_hi ^ dst_hi) * 31 + (src_lo ^ dst_lo);
}

/* The first USUAL bytes of a packet: RoCEv2 or TCP straight behind IPv4 without options, behind Ethernet.
 * Most packets are that. Anything else is UNUSUAL, and left to judge(). */
static __always_inline enum verdict judge_usual(const __u8 *at, struct found *found)
{
	__u64 src, dst, hosts;

	if (wide16(at + 12) != DPUFLOW_ETHERTYPE_IPV4 || at[14] != 0x45 || wide16(at + 20) & 0x1fff || settings.vlans)
		return UNUSUAL;
	src = 0xffff00000000ULL | wide32(at + 26);
	dst = 0xffff00000000ULL | wide32(at + 30);
	if (settings.hosts && !host_listed(0, src) && !host_listed(0, dst))
		return NOT_WANTED;
	hosts = host_pair(0, src, 0, dst);
	if (at[23] == 17 && wide16(at + 36) == DPUFLOW_ROCE_V2_PORT && settings.protocols & DPUFLOW_PROTOCOL_ROCE_V2) {
		found->src_lo = src;
		found->dst_lo = dst;
		found->bth_at = 42;
		found->ip_at = ETHERNET;
		return judge_bth(at[42], wide32(at + 46), hosts, found);
	}
	if (at[23] == 6)
		return judge_tcp(wide32(at + 34), hosts, found);
	return UNUSUAL;
}

/* `len` bytes of `head` are the packet's beginning; `tagged`: its VLAN tag where the kernel took it out,
 * with TAGGED set. */
static __always_inline enum verdict judge(const struct head *head, __u32 len, __u32 tagged, struct found *found)
{
	__u32 at = ETHERNET, next;
	__u64 src_hi = 0, src_lo, dst_hi = 0, dst_lo, hosts;
	__u16 type, protocol;

	type = be16(&head->byte[12]);
#pragma unroll
	for (int k = 0; k < 2; k++) {
		if (type != DPUFLOW_ETHERTYPE_VLAN && type != DPUFLOW_ETHERTYPE_QINQ)
			break;
		if (len < at + 4)
			return CUT;
		if (!tagged)
			tagged = be16(&head->byte[at]) | TAGGED;
		type = be16(&head->byte[at + 2]);
		at += 4;
	}
	if (settings.vlans && !(tagged & TAGGED && vlan_listed(tagged & 0xfff)))
		return NOT_WANTED;
	if (type == DPUFLOW_ETHERTYPE_MAC_CONTROL)
		return settings.protocols & DPUFLOW_PROTOCOL_PAUSE ? WANTED : unless_other(NOT_WANTED);

	if (type == DPUFLOW_ETHERTYPE_IPV4) {
		if (len < at + 20)
			return unless_other(CUT);
		next = at + (head->byte[at] & 15) * 4;
		protocol = be16(&head->byte[at + 6]) & 0x1fff ? LATER_FRAGMENT : head->byte[at + 9];
		src_lo = 0xffff00000000ULL | be32(&head->byte[at + 12]);
		dst_lo = 0xffff00000000ULL | be32(&head->byte[at + 16]);
	} else if (type == DPUFLOW_ETHERTYPE_IPV6 || type == DPUFLOW_ETHERTYPE_ROCE_V1) {
		if (len < at + 40)
			return unless_other(CUT);
		next = at + 40;
		protocol = head->byte[at + 6] == 44 ? LATER_FRAGMENT : head->byte[at + 6];
		src_hi = be64(&head->byte[at + 8]);
		src_lo = be64(&head->byte[at + 16]);
		dst_hi = be64(&head->byte[at + 24]);
		dst_lo = be64(&head->byte[at + 32]);
	} else {
		return unless_other(NOT_WANTED);
	}
	if (settings.hosts && !host_listed(src_hi, src_lo) && !host_listed(dst_hi, dst_lo))
		return NOT_WANTED;
	hosts = host_pair(src_hi, src_lo, dst_hi, dst_lo);

	if (type == DPUFLOW_ETHERTYPE_ROCE_V1) {
		if (!(settings.protocols & DPUFLOW_PROTOCOL_ROCE_V1))
			return unless_other(NOT_WANTED);
	} else {
		if (protocol == LATER_FRAGMENT)
			return unless_other(FRAGMENT);
		if (protocol != 6 && protocol != 17)
			return unless_other(NOT_WANTED);
		if (next > HEAD - 8 || len < next + 8)
			return unless_other(CUT);
		if (protocol == 6)
			return judge_tcp(be32(&head->byte[next]), hosts, found);
		if (be16(&head->byte[next + 2]) != DPUFLOW_ROCE_V2_PORT ||
		    !(settings.protocols & DPUFLOW_PROTOCOL_ROCE_V2))
			return unless_other(NOT_WANTED);
		next += 8;
	}
	if (next > HEAD - BTH || len < next + BTH)
		return unless_other(CUT);
	if (type != DPUFLOW_ETHERTYPE_ROCE_V1 || head->byte[at] >> 4 == 6) {
		found->src_hi = src_hi;
		found->src_lo = src_lo;
		found->dst_hi = dst_hi;
		found->dst_lo = dst_lo;
		found->bth_at = next;
		found->ip_at = at;
	}
	return judge_bth(head->byte[next], be32(&head->byte[next + 4]), hosts, found);
}

#endif
