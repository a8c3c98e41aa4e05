/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated release. Written for dpuflow. */
#ifndef SIMULATED_DOCA_VERSION_H
#define SIMULATED_DOCA_VERSION_H

#define DOCA_VERSION_MAJOR 3
#define DOCA_VERSION_MINOR 2
#define DOCA_VERSION_PATCH 2
#define SIMULATED (3 * 100 + 2)

#endif
