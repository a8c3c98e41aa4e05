/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated release. Written for dpuflow. */
#ifndef SIMULATED_DOCA_VERSION_H
#define SIMULATED_DOCA_VERSION_H

#define DOCA_VER_MAJOR 2
#define DOCA_VER_MINOR 5
#define DOCA_VER_PATCH 108
#define SIMULATED (2 * 100 + 5)

#endif
