/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the DOCA release at hand has. Every guard of the adapter is named here; probe.sh asks the headers
 * themselves where two sources disagree about the release, and its word wins.
 */
#ifndef DPUFLOW_RELEASE_H
#define DPUFLOW_RELEASE_H

#include <doca_version.h>

#if defined(DOCA_VERSION_MAJOR) /* from 2.7 */
#define RELEASE (DOCA_VERSION_MAJOR * 100 + DOCA_VERSION_MINOR)
#define RELEASE_PATCH DOCA_VERSION_PATCH
#elif defined(DOCA_VER_MAJOR) /* up to 2.5 */
#define RELEASE (DOCA_VER_MAJOR * 100 + DOCA_VER_MINOR)
#define RELEASE_PATCH DOCA_VER_PATCH
#else
#error "doca_version.h names no version: is this DOCA?"
#endif

#if RELEASE < 205
#error "dpuflow needs DOCA 2.5 at least: its matches on parsed headers are not in earlier releases"
#endif

/* How a copy is made. */
#define HAS_MIRROR (RELEASE < 302)
#define HAS_FLOODING (RELEASE >= 301)
/* The mirror's own forward takes the original up to 2.8, and must be left empty from 2.9. */
#define MIRROR_FORWARDS (RELEASE < 209)

/* What can be matched. */
#define HAS_BTH (RELEASE >= 303)
#define RANDOM_IS_BIG_ENDIAN (RELEASE >= 300)
#define PORT_MATCH_IS_ID (RELEASE >= 300)

/* How things are called. */
#ifndef OPAQUE_CONFIG
#define OPAQUE_CONFIG (RELEASE >= 207)
#endif
#ifndef BASIC_ADD_ENTRY
#define BASIC_ADD_ENTRY (RELEASE >= 303)
#endif
#ifndef ENTRY_FLAGS
#define ENTRY_FLAGS (RELEASE >= 303)
#endif
#define ACTION_INDEX (RELEASE >= 302)
#define RESOURCE_QUERY (RELEASE >= 209)
#define NESTED_RSS (RELEASE >= 209)
#define RENAMED_MIRROR_CONFIG (RELEASE >= 209)
#define RENAMED_REMOVE (RELEASE >= 209)

/* How a port is named. */
#define PORT_NUMBER (RELEASE >= 300)
#define ACTION_MEMORY (RELEASE >= 210)
#define REPRESENTOR_HANDLE (RELEASE >= 301)

/* How copies are received. */
#define QUEUES_WITHOUT_DPDK (RELEASE >= 303)

#endif
