/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of libibverbs that NCCL's net_ib calls, as RoCEv2 over UDP sockets (port 4791): one device, port 1, GID 0
 * the address of an interface, one process in a network namespace. RC only: WRITE, WRITE_WITH_IMM, READ, SEND,
 * SEND_WITH_IMM; no atomics, shared receive queues, events or dma-buf. README.md of the folder above says what it
 * does and what hardware does otherwise.
 */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <immintrin.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;
#define PORT 4791
#define BATCH 16 /* packets a sendmmsg */
#define RXB 64 /* packets a recvmmsg */
#define PKT 4352 /* room for one packet */
#define HASH 1024
#define MAXSGE 4
#define MAXINL 256
#define ACKEVERY 64
#define EXPORT __attribute__((visibility("default")))

enum {
	SEND_FIRST,
	SEND_MIDDLE,
	SEND_LAST,
	SEND_LAST_IMM,
	SEND_ONLY,
	SEND_ONLY_IMM,
	WRITE_FIRST,
	WRITE_MIDDLE,
	WRITE_LAST,
	WRITE_LAST_IMM,
	WRITE_ONLY,
	WRITE_ONLY_IMM,
	READ_REQ,
	READ_FIRST,
	READ_MIDDLE,
	READ_LAST,
	READ_ONLY,
	ACK
};

struct wqe {
	u64 wr_id, raddr, psn, len;
	u32 rkey, npkts, imm;
	int op, flags, nsge;
	struct ibv_sge sge[MAXSGE];
	u8 inl[MAXINL];
};

struct rwqe {
	u64 wr_id;
	int nsge;
	struct ibv_sge sge[MAXSGE];
};

struct cq {
	struct ibv_cq ib;
	pthread_spinlock_t lock;
	struct ibv_wc *ring;
	u64 head, tail, cap; /* under lock; tail is also read without */
};

struct mr {
	struct ibv_mr ib;
	u64 iova;
	int access;
	struct mr *next;
};

struct qp {
	struct ibv_qp ib;
	struct qp *hnext, *anext;
	int fd, active, sig_all, mtu, tc;
	u16 sport;
	struct sockaddr_in to;
	struct ibv_qp_attr attr;
	struct ibv_qp_cap cap;
	struct ibv_ece ece;
	/* requester */
	struct wqe *sq;
	u64 shead, stail, sidx; /* wqe counts: oldest unacknowledged, next free, next to send */
	u32 spkt; /* packet of sidx to send next */
	u64 una, psn, smax; /* oldest unacknowledged PSN, PSN of the next wqe, highest sent + 1 */
	int read_out;
	u32 read_got;
	i64 deadline, stuck, rnr_until;
	/* responder */
	struct rwqe *rq;
	u64 rhead, rtail, epsn;
	u32 msn, r_rkey, r_done;
	u64 r_va, r_left;
	int r_kind, nak; /* r_kind: 0 between messages, 1 write, 2 send */
};

static struct dev {
	struct ibv_device ib;
	pthread_mutex_t lock;
	int fd, ev, opened;
	u32 addr;
	char iface[IF_NAMESIZE];
	u8 mac[6];
	int mtu;
	struct qp *qps[HASH];
	struct mr *mrs[HASH];
	int nqps;
	struct qp *afirst, *alast;
	atomic_int nactive;
	u32 next_qpn, next_key;
	double ns_byte;
	i64 tx_free;
	int backlog, asleep;
	i64 next_scan, timeout_cap, spin;
	u32 window;
	int check, batch;
	u64 c_tx, c_rx, c_retx, c_nak, c_tmo, c_rnr, c_bad, c_seq, c_dup, c_again;
	u8 tx[BATCH][PKT];
	struct iovec txv[BATCH];
	struct mmsghdr txm[BATCH];
	u64 txu[BATCH];
	u8 rx[RXB][PKT];
	struct iovec rxv[RXB];
	struct mmsghdr rxm[RXB];
	struct sockaddr_in rxa[RXB];
} D = { .lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1 };

static pthread_once_t once = PTHREAD_ONCE_INIT;

static i64 now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static double envf(const char *k, double d)
{
	const char *s = getenv(k);
	return s && *s ? atof(s) : d;
}

static u32 rnd(void)
{
	u32 r = 0;
	if (getrandom(&r, 4, 0) != 4)
		r = (u32)now_ns() * 2654435761u;
	return r;
}

static void p16(u8 *p, u32 v)
{
	p[0] = v >> 8;
	p[1] = v;
}

static void p24(u8 *p, u32 v)
{
	p[0] = v >> 16;
	p[1] = v >> 8;
	p[2] = v;
}

static void p32(u8 *p, u32 v)
{
	v = htonl(v);
	memcpy(p, &v, 4);
}

static void p64(u8 *p, u64 v)
{
	v = __builtin_bswap64(v);
	memcpy(p, &v, 8);
}

static u32 g24(const u8 *p)
{
	return p[0] << 16 | p[1] << 8 | p[2];
}

static u32 g32(const u8 *p)
{
	u32 v;
	memcpy(&v, p, 4);
	return ntohl(v);
}

static u64 g64(const u8 *p)
{
	u64 v;
	memcpy(&v, p, 8);
	return __builtin_bswap64(v);
}

static i64 d24(u32 a, u64 b)
{
	return (int32_t)((a - (u32)b) << 8) >> 8;
} /* signed distance of 24-bit PSNs */

/* ---- CRC-32 ---- */

static u32 T[8][256];
static int have_clmul;

static u32 crc_table(u32 c, const u8 *p, size_t n)
{
	while (n >= 8) {
		u64 v;
		memcpy(&v, p, 8);
		v ^= c;
		c = T[7][v & 255] ^ T[6][v >> 8 & 255] ^ T[5][v >> 16 & 255] ^ T[4][v >> 24 & 255] ^
		    T[3][v >> 32 & 255] ^ T[2][v >> 40 & 255] ^ T[1][v >> 48 & 255] ^ T[0][v >> 56];
		p += 8;
		n -= 8;
	}
	while (n--)
		c = T[0][(c ^ *p++) & 255] ^ c >> 8;
	return c;
}

/* As crc_table, for n of 64 or more and a multiple of 16. */
__attribute__((target("pclmul,sse4.1"))) static u32 crc_fold(u32 c, const u8 *p, size_t n)
{
#define L(i) _mm_loadu_si128((const __m128i *)(p + 16 * (i)))
#define F(x, y) _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), y)
	__m128i k = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), low = _mm_setr_epi32(~0, 0, ~0, 0);
	__m128i a = _mm_xor_si128(L(0), _mm_cvtsi32_si128((int)c)), b = L(1), d = L(2), e = L(3), t;
	for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
		a = F(a, L(0));
		b = F(b, L(1));
		d = F(d, L(2));
		e = F(e, L(3));
	}
	k = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
	a = F(a, b);
	a = F(a, d);
	a = F(a, e);
	for (; n >= 16; p += 16, n -= 16)
		a = F(a, L(0));
	a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, k, 0x10));
	k = _mm_set_epi64x(0, 0x0163cd6124);
	t = _mm_srli_si128(a, 4);
	a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), k, 0x00), t);
	k = _mm_set_epi64x(0x01f7011641, 0x01db710641);
	t = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), k, 0x10), low);
	a = _mm_xor_si128(a, _mm_clmulepi64_si128(t, k, 0x00));
	return (u32)_mm_extract_epi32(a, 1);
}

static u32 crc(u32 c, const u8 *p, size_t n)
{
	if (have_clmul && n >= 64) {
		size_t m = n & ~15ul;
		c = crc_fold(c, p, m);
		p += m;
		n -= m;
	}
	return crc_table(c, p, n);
}

static void crc_init(void)
{
	for (u32 i = 0; i < 256; i++) {
		u32 c = i;
		for (int k = 0; k < 8; k++)
			c = c & 1 ? 0xedb88320u ^ c >> 1 : c >> 1;
		T[0][i] = c;
	}
	for (int i = 0; i < 256; i++)
		for (int k = 1; k < 8; k++)
			T[k][i] = T[0][T[k - 1][i] & 255] ^ T[k - 1][i] >> 8;
	u8 b[1024];
	for (int i = 0; i < 1024; i++)
		b[i] = i * 37 + (i >> 3);
	have_clmul = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
	for (int n = 64; have_clmul && n <= 1024; n += 16)
		if (crc_fold(n, b, n) != crc_table(n, b, n))
			have_clmul = 0;
}

/* The invariant CRC of a RoCEv2 packet: n bytes from the BTH on, without the ICRC itself. */
static u32 icrc(u32 src, u32 dst, u16 sport, const u8 *b, int n)
{
	u8 h[48];
	memset(h, 0xff, sizeof h);
	h[8] = 0x45;
	p16(h + 10, 20 + 8 + n + 4);
	p16(h + 12, 0);
	p16(h + 14, 0x4000);
	h[17] = 17;
	memcpy(h + 20, &src, 4);
	memcpy(h + 24, &dst, 4);
	p16(h + 28, sport);
	p16(h + 30, PORT);
	p16(h + 32, 8 + n + 4);
	memcpy(h + 36, b, 4);
	memcpy(h + 41, b + 5, 7);
	return ~crc(crc(~0u, h, 48), b + 12, n - 12);
}

/* ---- memory ---- */

static struct mr *find_mr(u32 key)
{
	struct mr *m = D.mrs[key >> 8 & (HASH - 1)];
	while (m && m->ib.rkey != key)
		m = m->next;
	return m;
}

static u8 *translate(u32 key, u64 va, u64 len, int need)
{
	struct mr *m = find_mr(key);
	if (!m || (m->access & need) != need || va < m->iova || len > m->ib.length ||
		va - m->iova > m->ib.length - len)
		return NULL;
	return (u8 *)m->ib.addr + (va - m->iova);
}

/* Ascending stores of 8 bytes: a reader that sees the end of a line sees what lies before it, as behind PCIe. */
static void put(u8 *d, const u8 *s, size_t n)
{
	while (n && (uintptr_t)d & 7) {
		*(volatile u8 *)d++ = *s++;
		n--;
	}
	for (; n >= 8; d += 8, s += 8, n -= 8) {
		u64 v;
		memcpy(&v, s, 8);
		*(volatile u64 *)d = v;
	}
	while (n--)
		*(volatile u8 *)d++ = *s++;
	atomic_thread_fence(memory_order_release);
}

static void gather(u8 *to, const struct wqe *w, u64 off, u64 n)
{
	if (w->flags & IBV_SEND_INLINE) {
		memcpy(to, w->inl + off, n);
		return;
	}
	for (int i = 0; i < w->nsge && n; i++) {
		if (off >= w->sge[i].length) {
			off -= w->sge[i].length;
			continue;
		}
		u64 m = w->sge[i].length - off;
		if (m > n)
			m = n;
		memcpy(to, (u8 *)(uintptr_t)w->sge[i].addr + off, m);
		to += m;
		n -= m;
		off = 0;
	}
}

/* Into a list of buffers; returned are the bytes that found no room. */
static u64 scatter(const struct ibv_sge *g, int ng, u64 off, const u8 *from, u64 n)
{
	for (int i = 0; i < ng && n; i++) {
		if (off >= g[i].length) {
			off -= g[i].length;
			continue;
		}
		u64 m = g[i].length - off;
		if (m > n)
			m = n;
		put((u8 *)(uintptr_t)g[i].addr + off, from, m);
		from += m;
		n -= m;
		off = 0;
	}
	return n;
}

/* ---- completions ---- */

static void push(struct cq *c, const struct ibv_wc *wc)
{
	pthread_spin_lock(&c->lock);
	if (c->tail - c->head == c->cap) {
		struct ibv_wc *r = malloc(2 * c->cap * sizeof *r);
		for (u64 i = c->head; i < c->tail; i++)
			r[i % (2 * c->cap)] = c->ring[i % c->cap];
		free(c->ring);
		c->ring = r;
		c->cap *= 2;
	}
	c->ring[c->tail % c->cap] = *wc;
	__atomic_store_n(&c->tail, c->tail + 1, __ATOMIC_RELEASE);
	pthread_spin_unlock(&c->lock);
}

static int poll_cq(struct ibv_cq *ib, int n, struct ibv_wc *wc)
{
	struct cq *c = (struct cq *)ib;
	int k = 0;
	if (__atomic_load_n(&c->tail, __ATOMIC_ACQUIRE) == __atomic_load_n(&c->head, __ATOMIC_RELAXED))
		return 0;
	pthread_spin_lock(&c->lock);
	while (k < n && c->head < c->tail) {
		wc[k++] = c->ring[c->head % c->cap];
		__atomic_store_n(&c->head, c->head + 1, __ATOMIC_RELAXED);
	}
	pthread_spin_unlock(&c->lock);
	return k;
}

static void complete_send(struct qp *q, const struct wqe *w, int status)
{
	if (status == IBV_WC_SUCCESS && !q->sig_all && !(w->flags & IBV_SEND_SIGNALED))
		return;
	struct ibv_wc wc = { .wr_id = w->wr_id, .status = status, .qp_num = q->ib.qp_num, .byte_len = w->len };
	wc.opcode = w->op == IBV_WR_RDMA_READ                               ? IBV_WC_RDMA_READ
		    : w->op == IBV_WR_SEND || w->op == IBV_WR_SEND_WITH_IMM ? IBV_WC_SEND
									    : IBV_WC_RDMA_WRITE;
	if (status != IBV_WC_SUCCESS)
		wc.vendor_err = 0x81;
	push((struct cq *)q->ib.send_cq, &wc);
}

/* Into the error state: the oldest send gets status, the rest are flushed. */
static void flush_qp(struct qp *q, int status)
{
	q->ib.state = q->attr.qp_state = IBV_QPS_ERR;
	for (; q->shead < q->stail; q->shead++, status = IBV_WC_WR_FLUSH_ERR)
		complete_send(q, &q->sq[q->shead % q->cap.max_send_wr], status);
	q->sidx = q->shead;
	q->spkt = 0;
	q->deadline = 0;
	for (; q->rhead < q->rtail; q->rhead++) {
		struct ibv_wc wc = { .wr_id = q->rq[q->rhead % q->cap.max_recv_wr].wr_id,
			.status = IBV_WC_WR_FLUSH_ERR,
			.opcode = IBV_WC_RECV,
			.qp_num = q->ib.qp_num };
		push((struct cq *)q->ib.recv_cq, &wc);
	}
}

/* ---- sending ---- */

static int bth(u8 *b, const struct qp *q, int op, u32 psn, int pad, int ackreq)
{
	b[0] = op;
	b[1] = 0x40 | pad << 4;
	b[2] = b[3] = 0xff; /* MigReq set, as a ConnectX sends it */
	b[4] = 0;
	p24(b + 5, q->attr.dest_qp_num);
	b[8] = ackreq ? 0x80 : 0;
	p24(b + 9, psn);
	return 12;
}

static int seal(const struct qp *q, u8 *b, int n)
{
	u32 c = icrc(D.addr, q->to.sin_addr.s_addr, q->sport, b, n);
	memcpy(b + n, &c, 4);
	return n + 4;
}

/* Send D.tx[0..n): how many went, -1 when the socket is full. */
static int xmit(struct qp *q, int n)
{
	for (int i = 0; i < n; i++) {
		struct msghdr *h = &D.txm[i].msg_hdr;
		h->msg_name = &q->to;
		h->msg_namelen = sizeof q->to;
		h->msg_iov = &D.txv[i];
		h->msg_iovlen = 1;
		h->msg_control = NULL;
		h->msg_controllen = 0;
		D.txv[i].iov_base = D.tx[i];
	}
	int k = sendmmsg(q->fd, D.txm, n, MSG_DONTWAIT);
	if (k < 0) {
		if (errno == EAGAIN || errno == EINTR || errno == ENOBUFS) {
			D.c_again++;
			return -1;
		}
		k = n;
	} /* any other failure: lost on the wire */
	D.c_tx += k;
	return k;
}

static void charge(int bytes, i64 now)
{
	i64 credit = D.backlog ? 200000 : 20000;
	if (D.tx_free < now - credit)
		D.tx_free = now - credit;
	D.tx_free += (i64)((bytes + 28 + 38) * D.ns_byte);
}

static int build(const struct qp *q, const struct wqe *w, u32 k, u8 *b)
{
	u64 off = (u64)k * q->mtu, n = w->op == IBV_WR_RDMA_READ    ? 0
				       : w->len - off > (u64)q->mtu ? (u64)q->mtu
								    : w->len - off;
	int first = k == 0, last = k == w->npkts - 1, send = w->op == IBV_WR_SEND || w->op == IBV_WR_SEND_WITH_IMM;
	int imm = last && (w->op == IBV_WR_SEND_WITH_IMM || w->op == IBV_WR_RDMA_WRITE_WITH_IMM);
	int op = first && last ? WRITE_ONLY + imm : first ? WRITE_FIRST : last ? WRITE_LAST + imm : WRITE_MIDDLE;
	if (send)
		op -= WRITE_FIRST;
	if (w->op == IBV_WR_RDMA_READ)
		op = READ_REQ;
	int pad = -n & 3, at = bth(b, q, op, w->psn + k, pad, last || k % ACKEVERY == ACKEVERY - 1 || op == READ_REQ);
	if (first && !send) {
		p64(b + at, w->raddr);
		p32(b + at + 8, w->rkey);
		p32(b + at + 12, w->len);
		at += 16;
	}
	if (imm) {
		memcpy(b + at, &w->imm, 4);
		at += 4;
	}
	if (n)
		gather(b + at, w, off, n);
	memset(b + at + n, 0, pad);
	return seal(q, b, at + n + pad);
}

/* A fixed cap makes a lost packet cheap; giving up still takes as long as was asked for. */
static i64 timeout(const struct qp *q)
{
	i64 t = q->attr.timeout && q->attr.timeout < 31 ? 4096ll << q->attr.timeout : D.timeout_cap;
	return t < D.timeout_cap ? t : D.timeout_cap;
}

static int can_send(const struct qp *q)
{
	if (q->ib.state != IBV_QPS_RTS || q->sidx >= q->stail || q->read_out || q->rnr_until)
		return 0;
	return q->sq[q->sidx % q->cap.max_send_wr].psn + q->spkt < q->una + D.window;
}

static void activate(struct qp *q)
{
	if (q->active || !can_send(q))
		return;
	q->active = 1;
	q->anext = NULL;
	if (D.alast)
		D.alast->anext = q;
	else
		D.afirst = q;
	D.alast = q;
	D.nactive++;
}

/* Round robin, a batch for each queue pair, while the port is free. */
static void tx_run(i64 now)
{
	while (D.afirst && D.tx_free <= now) {
		struct qp *q = D.afirst;
		if (!(D.afirst = q->anext))
			D.alast = NULL;
		q->active = 0;
		D.nactive--;
		if (!can_send(q))
			continue;
		u64 idx = q->sidx;
		u32 pkt = q->spkt;
		int n = 0, reads = 0;
		while (n < D.batch && idx < q->stail && !reads) {
			struct wqe *w = &q->sq[idx % q->cap.max_send_wr];
			if (w->psn + pkt >= q->una + D.window)
				break;
			if (w->op == IBV_WR_RDMA_READ) {
				if (q->una != w->psn || idx != q->shead)
					break;
				reads = 1;
			}
			D.txv[n].iov_len = build(q, w, pkt, D.tx[n]);
			D.txu[n++] = w->psn + pkt;
			if (reads || ++pkt == w->npkts) {
				idx++;
				pkt = 0;
			}
		}
		if (!n)
			continue; /* a read waits for what was sent before it */
		int k = xmit(q, n);
		if (k < 0) {
			D.tx_free = now + 50000;
			activate(q);
			break;
		}
		for (int i = 0; i < k; i++) {
			struct wqe *w = &q->sq[q->sidx % q->cap.max_send_wr];
			charge(D.txv[i].iov_len, now);
			if (D.txu[i] < q->smax)
				D.c_retx++;
			else
				q->smax = D.txu[i] + 1;
			if (w->op == IBV_WR_RDMA_READ) {
				q->read_out = 1;
				q->read_got = 0;
				q->smax = w->psn + w->npkts;
				q->sidx++;
				q->spkt = 0;
			} else if (++q->spkt == w->npkts) {
				q->sidx++;
				q->spkt = 0;
			}
		}
		if (!q->deadline) {
			q->deadline = now + timeout(q);
			q->stuck = now;
		}
		activate(q);
	}
	D.backlog = D.afirst != NULL;
}

/* Go back to the oldest unacknowledged packet. */
static void rewind_to(struct qp *q)
{
	q->read_out = 0;
	q->read_got = 0;
	q->sidx = q->shead;
	q->spkt = 0;
	if (q->shead < q->stail) {
		struct wqe *w = &q->sq[q->shead % q->cap.max_send_wr];
		if (q->una > w->psn)
			q->spkt = q->una - w->psn;
	}
}

/* PSNs below upto have arrived. */
static void acked(struct qp *q, u64 upto, i64 now)
{
	if (upto <= q->una || upto > q->smax)
		return;
	while (q->shead < q->stail) {
		struct wqe *w = &q->sq[q->shead % q->cap.max_send_wr];
		if (w->op == IBV_WR_RDMA_READ && q->read_got < w->npkts) {
			if (upto > w->psn)
				upto = w->psn;
			break;
		}
		if (w->psn + w->npkts > upto)
			break;
		complete_send(q, w, IBV_WC_SUCCESS);
		if (w->op == IBV_WR_RDMA_READ) {
			q->read_out = 0;
			q->read_got = 0;
		}
		if (q->sidx == q->shead) {
			q->sidx++;
			q->spkt = 0;
		}
		q->shead++;
	}
	if (upto > q->una)
		q->una = upto;
	if (q->sidx == q->shead && q->shead < q->stail) { /* acknowledged past the cursor after a rewind */
		struct wqe *w = &q->sq[q->shead % q->cap.max_send_wr];
		if (w->psn + q->spkt < q->una)
			q->spkt = q->una - w->psn;
	}
	q->stuck = now;
	q->deadline = q->una < q->smax ? now + timeout(q) : 0;
	activate(q);
}

/* ---- receiving ---- */

static void send_ack(struct qp *q, u32 psn, int syndrome)
{
	u8 b[24];
	int n = bth(b, q, ACK, psn, 0, 0);
	b[12] = syndrome;
	p24(b + 13, q->msn);
	n = seal(q, b, n + 4);

	union {
		char c[CMSG_SPACE(sizeof(int))];
		struct cmsghdr h;
	} u = { 0 };
	struct iovec v = { b, n };
	struct msghdr h = { .msg_name = &q->to,
		.msg_namelen = sizeof q->to,
		.msg_iov = &v,
		.msg_iovlen = 1,
		.msg_control = u.c,
		.msg_controllen = sizeof u.c };
	u.h.cmsg_level = IPPROTO_IP;
	u.h.cmsg_type = IP_TOS;
	u.h.cmsg_len = CMSG_LEN(sizeof(int));
	int tos = q->tc & 0xfc;
	memcpy(CMSG_DATA(&u.h), &tos, sizeof tos);
	sendmsg(q->fd, &h, MSG_DONTWAIT);
	if ((syndrome & 0x60) == 0x60)
		D.c_nak++;
	D.c_tx++;
	charge(n, now_ns());
}

static void read_response(struct qp *q, u32 psn, u32 rkey, u64 va, u64 len)
{
	u32 np = len ? (len + q->mtu - 1) / q->mtu : 1;
	const u8 *from = len ? translate(rkey, va, len, IBV_ACCESS_REMOTE_READ) : (const u8 *)"";
	if (!from) {
		send_ack(q, psn, 0x62);
		return;
	}
	for (u32 i = 0; i < np;) {
		int n = 0;
		for (; n < D.batch && i + n < np; n++) {
			u32 k = i + n;
			u64 off = (u64)k * q->mtu, m = len - off > (u64)q->mtu ? (u64)q->mtu : len - off;
			u8 *b = D.tx[n];
			int op = np == 1       ? READ_ONLY
				 : k == 0      ? READ_FIRST
				 : k == np - 1 ? READ_LAST
					       : READ_MIDDLE,
			    pad = -m & 3, at = bth(b, q, op, psn + k, pad, 0);
			if (op != READ_MIDDLE) {
				b[at] = 0x1f;
				p24(b + at + 1, q->msn);
				at += 4;
			}
			memcpy(b + at, from + off, m);
			memset(b + at + m, 0, pad);
			D.txv[n].iov_len = seal(q, b, at + m + pad);
		}
		int k = xmit(q, n);
		if (k < 0)
			return; /* the requester asks again */
		for (int j = 0; j < k; j++)
			charge(D.txv[j].iov_len, now_ns());
		i += k;
	}
}

/* A request has come; n are its bytes before the ICRC. */
static void responder(struct qp *q, const u8 *b, int n, int op, u32 psn)
{
	static const int rnr_code = 0x20;
	i64 d = d24(psn, q->epsn);
	int at = 12, pad = b[1] >> 4 & 3, ackreq = b[8] >> 7, send = op <= SEND_ONLY_IMM;
	int kind = op == READ_REQ ? 3
		   : send         ? 2
				  : 1,
	    o = send ? op : op - WRITE_FIRST; /* o: 0 first 1 middle 2 last 3 last+imm 4 only 5 only+imm */
	int first = o == 0 || o >= 4, last = o >= 2, imm = o == 3 || o == 5;
	if (d > 0) {
		D.c_seq++;
		if (!q->nak) {
			q->nak = 1;
			send_ack(q, q->epsn, 0x60);
		}
		return;
	}
	if (kind == 3)
		first = last = 1, imm = 0;
	u64 va = 0, dma = 0;
	u32 rkey = 0, im = 0;
	if (first && !send) {
		if (n < at + 16)
			goto bad;
		va = g64(b + at);
		rkey = g32(b + at + 8);
		dma = g32(b + at + 12);
		at += 16;
	}
	if (imm) {
		if (n < at + 4)
			goto bad;
		memcpy(&im, b + at, 4);
		at += 4;
	}
	if (n - at < pad)
		goto bad;
	u64 len = n - at - pad;
	if (d < 0) {
		D.c_dup++;
		if (kind == 3)
			read_response(q, psn, rkey, va, dma);
		else if (ackreq)
			send_ack(q, q->epsn - 1, 0x1f);
		return;
	}
	q->nak = 0;
	if (first != (q->r_kind == 0) || (!first && q->r_kind != kind))
		goto invalid;
	if (kind == 3) {
		if (dma && !translate(rkey, va, dma, IBV_ACCESS_REMOTE_READ))
			goto access;
		q->epsn += dma ? (dma + q->mtu - 1) / q->mtu : 1;
		q->msn++;
		read_response(q, psn, rkey, va, dma);
		return;
	}
	int take = send ? first : imm; /* needs a posted receive */
	if (take && q->rhead == q->rtail) {
		D.c_rnr++;
		q->nak = 1;
		send_ack(q, q->epsn, rnr_code | (q->attr.min_rnr_timer & 31));
		return;
	}
	if (first) {
		q->r_va = va;
		q->r_rkey = rkey;
		q->r_left = dma;
		q->r_done = 0;
	}
	if (!last && len != (u64)q->mtu)
		goto invalid_reset;
	if (send) {
		struct rwqe *r = &q->rq[q->rhead % q->cap.max_recv_wr];
		if (scatter(r->sge, r->nsge, q->r_done, b + at, len))
			goto invalid_reset;
	} else {
		if (len > q->r_left || (last && len != q->r_left))
			goto invalid_reset;
		if (len) {
			u8 *to = translate(q->r_rkey, q->r_va + q->r_done, q->r_left,
				IBV_ACCESS_REMOTE_WRITE); /* all that is left must fit */
			if (!to) {
				q->r_kind = 0;
				goto access;
			}
			put(to, b + at, len);
		}
		q->r_left -= len;
	}
	q->r_done += len;
	q->epsn++;
	q->r_kind = last ? 0 : kind;
	if (last)
		q->msn++;
	if (last && (send || imm)) {
		struct rwqe *r = &q->rq[q->rhead % q->cap.max_recv_wr];
		struct ibv_wc wc = { .wr_id = r->wr_id,
			.opcode = send ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM,
			.byte_len = q->r_done,
			.imm_data = im,
			.qp_num = q->ib.qp_num,
			.src_qp = q->attr.dest_qp_num,
			.wc_flags = imm ? IBV_WC_WITH_IMM : 0 };
		q->rhead++;
		push((struct cq *)q->ib.recv_cq, &wc);
	}
	if (ackreq)
		send_ack(q, psn, 0x1f);
	return;
access:
	send_ack(q, psn, 0x62);
	return;
invalid_reset:
	q->r_kind = 0;
invalid:
	send_ack(q, psn, 0x61);
	return;
bad:
	D.c_bad++;
}

static const u32 rnr_us[32] = { 655360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560,
	3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520 };

static void requester(struct qp *q, const u8 *b, int n, int op, u32 psn, i64 now)
{
	u64 p = q->una + d24(psn, q->una);
	int syn = 0x1f, at = 12;
	if (op != READ_MIDDLE) {
		if (n < 16) {
			D.c_bad++;
			return;
		}
		syn = b[12];
		at = 16;
	}
	if (op == ACK) {
		if (!(syn & 0x60)) {
			acked(q, p + 1, now);
			return;
		}
		if ((i64)(p - q->una) < 0 || p >= q->smax)
			return;
		acked(q, p, now);
		if ((syn & 0x60) == 0x20) {
			q->rnr_until = now + rnr_us[syn & 31] * 1000ll;
			q->stuck = now;
			q->deadline = 0;
			if (q->rnr_until < D.next_scan)
				D.next_scan = q->rnr_until;
			rewind_to(q);
		} else if (syn == 0x60) {
			rewind_to(q);
			q->stuck = now;
			q->deadline = now + timeout(q);
			activate(q);
		} else
			flush_qp(q, syn == 0x61   ? IBV_WC_REM_INV_REQ_ERR
				    : syn == 0x62 ? IBV_WC_REM_ACCESS_ERR
						  : IBV_WC_REM_OP_ERR);
		return;
	}
	if (q->shead == q->stail || !q->read_out)
		return;
	struct wqe *w = &q->sq[q->shead % q->cap.max_send_wr];
	if (w->op != IBV_WR_RDMA_READ || p != w->psn + q->read_got)
		return;
	u64 off = (u64)q->read_got * q->mtu;
	int pad = b[1] >> 4 & 3;
	if (n - at - pad < 0 || off + (n - at - pad) > w->len)
		return;
	scatter(w->sge, w->nsge, off, b + at, n - at - pad);
	q->stuck = now;
	if (++q->read_got == w->npkts)
		acked(q, w->psn + w->npkts, now);
}

static void receive(const u8 *b, int n, const struct sockaddr_in *from, i64 now)
{
	D.c_rx++;
	if (n < 16 || b[0] > ACK) {
		D.c_bad++;
		return;
	}
	u32 qpn = g24(b + 5), psn = g24(b + 9);
	struct qp *q = D.qps[qpn & (HASH - 1)];
	while (q && q->ib.qp_num != qpn)
		q = q->hnext;
	if (!q || (q->ib.state != IBV_QPS_RTR && q->ib.state != IBV_QPS_RTS) ||
		from->sin_addr.s_addr != q->to.sin_addr.s_addr) {
		D.c_bad++;
		return;
	}
	n -= 4;
	if (D.check) {
		u32 c = icrc(from->sin_addr.s_addr, D.addr, ntohs(from->sin_port), b, n);
		if (memcmp(&c, b + n, 4)) {
			D.c_bad++;
			return;
		}
	}
	if (b[0] <= READ_REQ)
		responder(q, b, n, b[0], psn);
	else
		requester(q, b, n, b[0], psn, now);
}

static void timers(i64 now)
{
	D.next_scan = now + 5000000;
	for (int h = 0; h < HASH && D.nqps; h++)
		for (struct qp *q = D.qps[h]; q; q = q->hnext) {
			if (q->rnr_until && q->rnr_until <= now) {
				q->rnr_until = 0;
				activate(q);
			}
			if (q->rnr_until && q->rnr_until < D.next_scan)
				D.next_scan = q->rnr_until;
			if (q->ib.state != IBV_QPS_RTS || !q->deadline || q->una >= q->smax)
				continue;
			if (q->deadline <= now) {
				i64 t = q->attr.timeout && q->attr.timeout < 31 ? 4096ll << q->attr.timeout
										: 500000000ll,
				    give_up = t * (q->attr.retry_cnt + 1);
				i64 least = D.timeout_cap * (q->attr.retry_cnt + 1);
				if (give_up < least)
					give_up = least;
				if (now - q->stuck > give_up) {
					flush_qp(q, IBV_WC_RETRY_EXC_ERR);
					continue;
				}
				D.c_tmo++;
				rewind_to(q);
				q->deadline = now + timeout(q);
				activate(q);
			} else if (q->deadline < D.next_scan)
				D.next_scan = q->deadline;
		}
}

static void *progress(void *unused)
{
	(void)unused;
	prctl(PR_SET_NAME, "shim-roce");
	prctl(PR_SET_TIMERSLACK, 1000);
	i64 last = 0;
	for (;;) {
		for (int i = 0; i < RXB; i++)
			D.rxm[i].msg_hdr.msg_namelen = sizeof D.rxa[i];
		int n = recvmmsg(D.fd, D.rxm, RXB, MSG_DONTWAIT, NULL);
		i64 now = now_ns(), wait;
		if (n < 0)
			n = 0;
		if (n)
			last = now;
		else if (!D.nactive && now < __atomic_load_n(&D.next_scan, __ATOMIC_RELAXED) && now - last < D.spin) {
			_mm_pause();
			continue;
		}
		pthread_mutex_lock(&D.lock);
		for (int i = 0; i < n; i++)
			receive(D.rx[i], D.rxm[i].msg_len, &D.rxa[i], now);
		if (now >= D.next_scan && n < RXB)
			timers(now); /* not while acknowledgements may wait in the socket */
		if (D.afirst)
			tx_run(now_ns());
		now = now_ns();
		wait = D.afirst && D.tx_free < D.next_scan ? D.tx_free - now : D.next_scan - now;
		D.asleep = !D.afirst;
		pthread_mutex_unlock(&D.lock);
		if (n == RXB || wait < 5000)
			continue;
		struct pollfd f[2] = { { D.fd, POLLIN, 0 }, { D.ev, POLLIN, 0 } };
		struct timespec ts = { wait / 1000000000, wait % 1000000000 };
		if (n && D.spin)
			continue;
		if (ppoll(f, 2, &ts, NULL) > 0 && f[1].revents) {
			u64 v;
			if (read(D.ev, &v, 8) < 0)
				continue;
		}
	}
	return NULL;
}

/* After new work, with the lock held. */
static void kick(void)
{
	tx_run(now_ns());
	if (D.afirst && D.asleep) {
		u64 one = 1;
		D.asleep = 0;
		if (write(D.ev, &one, 8) < 0)
			return;
	}
}

/* ---- work requests ---- */

static int post_send(struct ibv_qp *ib, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct qp *q = (struct qp *)ib;
	int rc = 0;
	pthread_mutex_lock(&D.lock);
	for (; wr; wr = wr->next) {
		if (ib->state != IBV_QPS_RTS && ib->state != IBV_QPS_ERR) {
			rc = EINVAL;
			break;
		}
		if (wr->num_sge > MAXSGE || (wr->opcode > IBV_WR_RDMA_READ)) {
			rc = EINVAL;
			break;
		}
		if (q->stail - q->shead >= q->cap.max_send_wr) {
			rc = ENOMEM;
			break;
		}
		struct wqe *w = &q->sq[q->stail % q->cap.max_send_wr];
		w->wr_id = wr->wr_id;
		w->op = wr->opcode;
		w->flags = wr->send_flags;
		w->imm = wr->imm_data;
		w->nsge = wr->num_sge;
		w->raddr = wr->wr.rdma.remote_addr;
		w->rkey = wr->wr.rdma.rkey;
		w->len = 0;
		for (int i = 0; i < wr->num_sge; i++) {
			w->sge[i] = wr->sg_list[i];
			if (w->flags & IBV_SEND_INLINE) {
				if (w->len + wr->sg_list[i].length > MAXINL) {
					rc = EINVAL;
					break;
				}
				memcpy(w->inl + w->len, (void *)(uintptr_t)wr->sg_list[i].addr,
					wr->sg_list[i].length);
			}
			w->len += wr->sg_list[i].length;
		}
		if (rc)
			break;
		if (ib->state == IBV_QPS_ERR) {
			complete_send(q, w, IBV_WC_WR_FLUSH_ERR);
			continue;
		}
		w->npkts = w->len ? (w->len + q->mtu - 1) / q->mtu : 1;
		w->psn = q->psn;
		q->psn += w->npkts;
		q->stail++;
	}
	if (rc && bad)
		*bad = wr;
	activate(q);
	kick();
	pthread_mutex_unlock(&D.lock);
	return rc;
}

static int post_recv(struct ibv_qp *ib, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct qp *q = (struct qp *)ib;
	int rc = 0;
	pthread_mutex_lock(&D.lock);
	for (; wr; wr = wr->next) {
		if (ib->state == IBV_QPS_RESET || wr->num_sge > MAXSGE) {
			rc = EINVAL;
			break;
		}
		if (q->rtail - q->rhead >= q->cap.max_recv_wr) {
			rc = ENOMEM;
			break;
		}
		if (ib->state == IBV_QPS_ERR) {
			struct ibv_wc wc = { .wr_id = wr->wr_id,
				.status = IBV_WC_WR_FLUSH_ERR,
				.opcode = IBV_WC_RECV,
				.qp_num = ib->qp_num };
			push((struct cq *)ib->recv_cq, &wc);
			continue;
		}
		struct rwqe *r = &q->rq[q->rtail % q->cap.max_recv_wr];
		r->wr_id = wr->wr_id;
		r->nsge = wr->num_sge;
		for (int i = 0; i < wr->num_sge; i++)
			r->sge[i] = wr->sg_list[i];
		q->rtail++;
	}
	if (rc && bad)
		*bad = wr;
	pthread_mutex_unlock(&D.lock);
	return rc;
}

static int req_notify(struct ibv_cq *cq, int solicited)
{
	(void)cq;
	(void)solicited;
	return 0;
}

/* ---- the device ---- */

static void stats(void)
{
	fprintf(stderr,
		"shim-roce %d: tx %lu rx %lu retx %lu nak %lu timeouts %lu rnr %lu out-of-order %lu duplicate %lu "
		"bad %lu socket-full %lu\n",
		(int)getpid(), D.c_tx, D.c_rx, D.c_retx, D.c_nak, D.c_tmo, D.c_rnr, D.c_seq, D.c_dup, D.c_bad,
		D.c_again);
}

static void setup(void)
{
	crc_init();
	const char *want = getenv("SHIM_IFACE");
	if (!want || !*want)
		want = "e0";
	struct ifaddrs *all, *a;
	if (getifaddrs(&all))
		return;
	for (a = all; a && !D.addr; a = a->ifa_next)
		if (a->ifa_addr && a->ifa_addr->sa_family == AF_INET && !strcmp(a->ifa_name, want))
			D.addr = ((struct sockaddr_in *)a->ifa_addr)->sin_addr.s_addr;
	freeifaddrs(all);
	if (!D.addr)
		return;
	snprintf(D.iface, sizeof D.iface, "%s", want);
	struct ifreq r = { 0 };
	snprintf(r.ifr_name, sizeof r.ifr_name, "%s", want);
	int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	D.mtu = ioctl(s, SIOCGIFMTU, &r) ? 1500 : r.ifr_mtu;
	if (!ioctl(s, SIOCGIFHWADDR, &r))
		memcpy(D.mac, r.ifr_hwaddr.sa_data, 6);
	close(s);
	const char *name = getenv("SHIM_DEV");
	if (!name || !*name)
		name = "mlx5_0";
	D.ib.node_type = IBV_NODE_CA;
	D.ib.transport_type = IBV_TRANSPORT_IB;
	snprintf(D.ib.name, sizeof D.ib.name, "%s", name);
	snprintf(D.ib.dev_name, sizeof D.ib.dev_name, "uverbs0");
	snprintf(D.ib.dev_path, sizeof D.ib.dev_path, "/sys/class/infiniband_verbs/uverbs0");
	snprintf(D.ib.ibdev_path, sizeof D.ib.ibdev_path, "/sys/class/infiniband/%s", name);
	double g = envf("SHIM_GBPS", 25);
	D.ns_byte = g > 0 ? 8 / g : 0;
	D.timeout_cap = envf("SHIM_TIMEOUT_MS", 50) * 1e6;
	if (D.timeout_cap < 100000)
		D.timeout_cap = 100000;
	D.window = envf("SHIM_WINDOW", 256);
	if (D.window < ACKEVERY)
		D.window = ACKEVERY;
	D.batch = envf("SHIM_BATCH", BATCH);
	if (D.batch < 1 || D.batch > BATCH)
		D.batch = BATCH;
	D.spin = envf("SHIM_SPIN_US", sysconf(_SC_NPROCESSORS_ONLN) >= 8 ? 30 : 0) * 1000;
	D.check = envf("SHIM_CHECK_ICRC", 0);
	D.next_qpn = 0x100 + rnd() % 0x1ff00;
	D.next_key = 0x1000 + rnd() % 0x1f0000;
	if (getenv("SHIM_STATS"))
		atexit(stats);
}

static int bufs(int fd)
{
	int v = 64 << 20, no = 1, pmtu = IP_PMTUDISC_DO;
	if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &v, sizeof v))
		setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &v, sizeof v);
	if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &v, sizeof v))
		setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &v, sizeof v);
	setsockopt(fd, SOL_SOCKET, SO_NO_CHECK, &no, sizeof no); /* RoCEv2 sends UDP checksum 0 */
	return setsockopt(fd, IPPROTO_IP, IP_MTU_DISCOVER, &pmtu, sizeof pmtu); /* DF, so the IP id is 0 */
}

static int start(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(PORT), .sin_addr.s_addr = D.addr };
	D.fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bufs(D.fd);
	if (bind(D.fd, (struct sockaddr *)&a, sizeof a)) {
		fprintf(stderr, "shim-roce: UDP port 4791 on %s: %s\n", D.iface, strerror(errno));
		close(D.fd);
		return -1;
	}
	D.ev = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	for (int i = 0; i < RXB; i++) {
		D.rxv[i] = (struct iovec){ D.rx[i], PKT };
		D.rxm[i].msg_hdr = (struct msghdr){
			.msg_name = &D.rxa[i], .msg_namelen = sizeof D.rxa[i], .msg_iov = &D.rxv[i], .msg_iovlen = 1
		};
	}
	sigset_t all, old;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	pthread_t t;
	int rc = pthread_create(&t, NULL, progress, NULL);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (!rc)
		pthread_detach(t);
	return rc ? -1 : 0;
}

EXPORT struct ibv_device **ibv_get_device_list(int *n)
{
	pthread_once(&once, setup);
	struct ibv_device **l = calloc(2, sizeof *l);
	if (D.addr)
		l[0] = &D.ib;
	if (n)
		*n = D.addr != 0;
	return l;
}

EXPORT void ibv_free_device_list(struct ibv_device **l)
{
	free(l);
}

EXPORT const char *ibv_get_device_name(struct ibv_device *d)
{
	return d->name;
}

EXPORT __be64 ibv_get_device_guid(struct ibv_device *d)
{
	(void)d;
	u8 g[8] = { D.mac[0] ^ 2, D.mac[1], D.mac[2], 0xff, 0xfe, D.mac[3], D.mac[4], D.mac[5] };
	u64 v;
	memcpy(&v, g, 8);
	return v;
}

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *d)
{
	pthread_mutex_lock(&D.lock);
	int bad = !D.opened && start();
	if (!bad)
		D.opened = 1;
	pthread_mutex_unlock(&D.lock);
	if (bad)
		return NULL;
	struct ibv_context *c = calloc(1, sizeof *c);
	c->device = d;
	c->cmd_fd = c->async_fd = -1;
	c->num_comp_vectors = 1;
	pthread_mutex_init(&c->mutex, NULL);
	c->ops.poll_cq = poll_cq;
	c->ops.req_notify_cq = req_notify;
	c->ops.post_send = post_send;
	c->ops.post_recv = post_recv;
	return c;
}

EXPORT int ibv_close_device(struct ibv_context *c)
{
	(void)c;
	return 0;
} /* the context stays: a thread may wait in ibv_get_async_event */

EXPORT int ibv_get_async_event(struct ibv_context *c, struct ibv_async_event *e)
{
	(void)c;
	(void)e;
	for (;;)
		sleep(3600);
}

EXPORT void ibv_ack_async_event(struct ibv_async_event *e)
{
	(void)e;
}

EXPORT const char *ibv_event_type_str(enum ibv_event_type e)
{
	(void)e;
	return "event";
}

EXPORT const char *ibv_wc_status_str(enum ibv_wc_status s)
{
	(void)s;
	return "status";
}

EXPORT int ibv_fork_init(void)
{
	return 0;
}

EXPORT int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a)
{
	memset(a, 0, sizeof *a);
	strcpy(a->fw_ver, "28.43.2026");
	a->node_guid = a->sys_image_guid = ibv_get_device_guid(c->device);
	a->max_mr_size = ~0ull;
	a->page_size_cap = ~0xfffull;
	a->vendor_id = 0x02c9;
	a->vendor_part_id = 4129;
	a->max_qp = 131072;
	a->max_qp_wr = 32768;
	a->max_sge = MAXSGE;
	a->max_cq = 16777216;
	a->max_cqe = 4194303;
	a->max_mr = 16777216;
	a->max_pd = 8388608;
	a->max_qp_rd_atom = 16;
	a->max_qp_init_rd_atom = 16;
	a->max_pkeys = 128;
	a->phys_port_cnt = 1;
	a->local_ca_ack_delay = 16;
	return 0;
}

EXPORT int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *out)
{
	(void)c;
	struct ibv_port_attr *a = (struct ibv_port_attr *)out;
	if (port != 1)
		return EINVAL;
	memset(a, 0, offsetof(struct ibv_port_attr, port_cap_flags2));
	a->state = IBV_PORT_ACTIVE;
	a->max_mtu = IBV_MTU_4096;
	a->gid_tbl_len = 1;
	a->max_msg_sz = 1u << 30;
	a->pkey_tbl_len = 1;
	a->phys_state = 5;
	a->active_mtu = IBV_MTU_256;
	for (int m = IBV_MTU_4096; m > IBV_MTU_256; m--)
		if ((128 << m) + 28 + 12 + 16 + 4 + 4 <= D.mtu) {
			a->active_mtu = m;
			break;
		}
	a->link_layer = IBV_LINK_LAYER_ETHERNET;
	a->max_vl_num = 1;
	int g = envf("SHIM_PORT_GBPS", 100);
	a->active_width = g >= 40 ? 2 : 1;
	a->active_speed = g >= 400 ? 128 : g >= 200 ? 64 : g == 40 || g == 10 ? 4 : 32;
	if (g == 50)
		a->active_width = 1, a->active_speed = 64;
	return 0;
}

EXPORT int ibv_query_gid(struct ibv_context *c, uint8_t port, int i, union ibv_gid *g)
{
	(void)c;
	memset(g, 0, sizeof *g);
	if (port != 1 || i < 0)
		return EINVAL;
	if (i == 0) {
		g->raw[10] = g->raw[11] = 0xff;
		memcpy(g->raw + 12, &D.addr, 4);
	}
	return 0;
}

EXPORT int ibv_query_pkey(struct ibv_context *c, uint8_t port, int i, __be16 *k)
{
	(void)c;
	(void)port;
	(void)i;
	*k = 0xffff;
	return 0;
}

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *c)
{
	struct ibv_pd *p = calloc(1, sizeof *p);
	p->context = c;
	return p;
}

EXPORT int ibv_dealloc_pd(struct ibv_pd *p)
{
	free(p);
	return 0;
}

EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova, unsigned access)
{
	struct mr *m = calloc(1, sizeof *m);
	pthread_mutex_lock(&D.lock);
	D.next_key += 1 + rnd() % 7;
	m->ib = (struct ibv_mr){
		.context = pd->context, .pd = pd, .addr = addr, .length = len, .handle = D.next_key
	};
	m->ib.lkey = m->ib.rkey = (D.next_key & 0xffffff) << 8 | (rnd() & 255);
	m->iova = iova;
	m->access = access;
	struct mr **at = &D.mrs[m->ib.rkey >> 8 & (HASH - 1)];
	m->next = *at;
	*at = m;
	pthread_mutex_unlock(&D.lock);
	return &m->ib;
}

EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access)
{
	return ibv_reg_mr_iova2(pd, addr, len, (uintptr_t)addr, access);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova, int access)
{
	return ibv_reg_mr_iova2(pd, addr, len, iova, access);
}

EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(
	struct ibv_pd *pd, uint64_t off, size_t len, uint64_t iova, int fd, int access)
{
	(void)pd;
	(void)off;
	(void)len;
	(void)iova;
	(void)fd;
	(void)access;
	errno = EOPNOTSUPP;
	return NULL;
}

EXPORT int ibv_dereg_mr(struct ibv_mr *ib)
{
	pthread_mutex_lock(&D.lock);
	for (struct mr **at = &D.mrs[ib->rkey >> 8 & (HASH - 1)]; *at; at = &(*at)->next)
		if (&(*at)->ib == ib) {
			*at = (*at)->next;
			break;
		}
	pthread_mutex_unlock(&D.lock);
	free(ib);
	return 0;
}

EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *c, int cqe, void *ctx, struct ibv_comp_channel *ch, int vec)
{
	(void)vec;
	struct cq *q = calloc(1, sizeof *q);
	q->ib.context = c;
	q->ib.channel = ch;
	q->ib.cq_context = ctx;
	q->ib.cqe = cqe;
	pthread_mutex_init(&q->ib.mutex, NULL);
	pthread_cond_init(&q->ib.cond, NULL);
	pthread_spin_init(&q->lock, 0);
	q->cap = cqe < 64 ? 64 : cqe;
	q->ring = calloc(q->cap, sizeof *q->ring);
	return &q->ib;
}

EXPORT int ibv_destroy_cq(struct ibv_cq *ib)
{
	struct cq *q = (struct cq *)ib;
	free(q->ring);
	free(q);
	return 0;
}

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
	if (a->qp_type != IBV_QPT_RC || a->cap.max_send_sge > MAXSGE || a->cap.max_recv_sge > MAXSGE ||
		a->cap.max_inline_data > MAXINL) {
		errno = EINVAL;
		return NULL;
	}
	struct qp *q = calloc(1, sizeof *q);
	q->ib.context = pd->context;
	q->ib.qp_context = a->qp_context;
	q->ib.pd = pd;
	q->ib.send_cq = a->send_cq;
	q->ib.recv_cq = a->recv_cq;
	q->ib.qp_type = a->qp_type;
	q->ib.state = IBV_QPS_RESET;
	q->fd = -1;
	q->sig_all = a->sq_sig_all;
	q->mtu = 1024;
	pthread_mutex_init(&q->ib.mutex, NULL);
	pthread_cond_init(&q->ib.cond, NULL);
	q->cap = a->cap;
	if (!q->cap.max_send_wr)
		q->cap.max_send_wr = 1;
	if (!q->cap.max_recv_wr)
		q->cap.max_recv_wr = 1;
	q->sq = calloc(q->cap.max_send_wr, sizeof *q->sq);
	q->rq = calloc(q->cap.max_recv_wr, sizeof *q->rq);
	q->ece = (struct ibv_ece){ .vendor_id = 0x15b3, .options = 0x30000002 };
	pthread_mutex_lock(&D.lock);
	D.next_qpn = (D.next_qpn + 1 + rnd() % 3) & 0xffffff;
	if (D.next_qpn < 0x100)
		D.next_qpn = 0x100;
	q->ib.qp_num = q->ib.handle = D.next_qpn;
	q->hnext = D.qps[q->ib.qp_num & (HASH - 1)];
	D.qps[q->ib.qp_num & (HASH - 1)] = q;
	D.nqps++;
	pthread_mutex_unlock(&D.lock);
	return &q->ib;
}

static int qp_socket(struct qp *q)
{
	u32 h = q->ib.qp_num * 0x9e3779b1u ^ q->attr.dest_qp_num * 0x85ebca6bu;
	h ^= h >> 15;
	q->fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (q->fd < 0)
		return errno;
	int one = 1, tos = (q->tc & 0xfc) | 2, small = 4096;
	bufs(q->fd);
	setsockopt(q->fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
	setsockopt(q->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	setsockopt(q->fd, IPPROTO_IP, IP_TOS, &tos, sizeof tos);
	int ttl = q->attr.ah_attr.grh.hop_limit;
	if (ttl)
		setsockopt(q->fd, IPPROTO_IP, IP_TTL, &ttl, sizeof ttl);
	for (int i = 0; i < 64; i++) {
		struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = D.addr };
		q->sport = 0xc000 | ((h + i) & 0x3fff);
		a.sin_port = htons(q->sport);
		if (!bind(q->fd, (struct sockaddr *)&a, sizeof a))
			return 0;
	}
	int e = errno;
	close(q->fd);
	q->fd = -1;
	return e;
}

EXPORT int ibv_modify_qp(struct ibv_qp *ib, struct ibv_qp_attr *a, int mask)
{
	struct qp *q = (struct qp *)ib;
	int rc = 0;
	pthread_mutex_lock(&D.lock);
	struct ibv_qp_attr *k = &q->attr;
	if (mask & IBV_QP_PKEY_INDEX)
		k->pkey_index = a->pkey_index;
	if (mask & IBV_QP_PORT)
		k->port_num = a->port_num;
	if (mask & IBV_QP_ACCESS_FLAGS)
		k->qp_access_flags = a->qp_access_flags;
	if (mask & IBV_QP_PATH_MTU) {
		k->path_mtu = a->path_mtu;
		q->mtu = 128 << a->path_mtu;
	}
	if (mask & IBV_QP_DEST_QPN)
		k->dest_qp_num = a->dest_qp_num & 0xffffff;
	if (mask & IBV_QP_RQ_PSN) {
		k->rq_psn = a->rq_psn & 0xffffff;
		q->epsn = k->rq_psn + (1ull << 32);
	}
	if (mask & IBV_QP_MIN_RNR_TIMER)
		k->min_rnr_timer = a->min_rnr_timer;
	if (mask & IBV_QP_TIMEOUT)
		k->timeout = a->timeout;
	if (mask & IBV_QP_RETRY_CNT)
		k->retry_cnt = a->retry_cnt;
	if (mask & IBV_QP_RNR_RETRY)
		k->rnr_retry = a->rnr_retry;
	if (mask & IBV_QP_SQ_PSN) {
		k->sq_psn = a->sq_psn & 0xffffff;
		q->psn = q->una = q->smax = k->sq_psn + (1ull << 32);
	}
	if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
		k->max_rd_atomic = a->max_rd_atomic;
	if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
		k->max_dest_rd_atomic = a->max_dest_rd_atomic;
	if (mask & IBV_QP_AV) {
		k->ah_attr = a->ah_attr;
		q->tc = a->ah_attr.grh.traffic_class;
		q->to = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(PORT) };
		memcpy(&q->to.sin_addr, a->ah_attr.grh.dgid.raw + 12, 4);
	}
	if (mask & IBV_QP_STATE) {
		if (a->qp_state == IBV_QPS_RTR && q->fd < 0)
			rc = qp_socket(q);
		if (!rc) {
			ib->state = k->qp_state = a->qp_state;
			if (a->qp_state == IBV_QPS_ERR)
				flush_qp(q, IBV_WC_WR_FLUSH_ERR);
			if (a->qp_state == IBV_QPS_RESET) {
				q->shead = q->stail = q->sidx = q->rhead = q->rtail = 0;
				q->spkt = 0;
				q->r_kind = q->nak = q->read_out = 0;
				q->msn = 0;
				q->deadline = q->rnr_until = 0;
				if (q->fd >= 0)
					close(q->fd);
				q->fd = -1;
			}
		}
	}
	pthread_mutex_unlock(&D.lock);
	return rc;
}

EXPORT int ibv_query_qp(struct ibv_qp *ib, struct ibv_qp_attr *a, int mask, struct ibv_qp_init_attr *i)
{
	struct qp *q = (struct qp *)ib;
	(void)mask;
	memcpy(a, &q->attr, offsetof(struct ibv_qp_attr, rate_limit));
	a->qp_state = a->cur_qp_state = ib->state;
	a->cap = q->cap;
	memset(i, 0, sizeof *i);
	i->qp_context = ib->qp_context;
	i->send_cq = ib->send_cq;
	i->recv_cq = ib->recv_cq;
	i->qp_type = ib->qp_type;
	i->cap = q->cap;
	i->sq_sig_all = q->sig_all;
	return 0;
}

EXPORT int ibv_query_ece(struct ibv_qp *ib, struct ibv_ece *e)
{
	*e = ((struct qp *)ib)->ece;
	return 0;
}

EXPORT int ibv_set_ece(struct ibv_qp *ib, struct ibv_ece *e)
{
	((struct qp *)ib)->ece = *e;
	return 0;
}

EXPORT int ibv_destroy_qp(struct ibv_qp *ib)
{
	struct qp *q = (struct qp *)ib;
	pthread_mutex_lock(&D.lock);
	for (struct qp **at = &D.qps[ib->qp_num & (HASH - 1)]; *at; at = &(*at)->hnext)
		if (*at == q) {
			*at = q->hnext;
			D.nqps--;
			break;
		}
	if (q->active) {
		struct qp *prev = NULL;
		for (struct qp *x = D.afirst; x; prev = x, x = x->anext)
			if (x == q) {
				if (prev)
					prev->anext = q->anext;
				else
					D.afirst = q->anext;
				if (D.alast == q)
					D.alast = prev;
				break;
			}
		D.nactive--;
	}
	pthread_mutex_unlock(&D.lock);
	if (q->fd >= 0)
		close(q->fd);
	free(q->sq);
	free(q->rq);
	free(q);
	return 0;
}
