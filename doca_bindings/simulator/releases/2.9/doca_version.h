/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated release. Written for dpuflow. */
#ifndef SIMULATED_DOCA_VERSION_H
#define SIMULATED_DOCA_VERSION_H

#define DOCA_VERSION_MAJOR 2
#define DOCA_VERSION_MINOR 9
#define DOCA_VERSION_PATCH 72
#define SIMULATED (2 * 100 + 9)

#endif
