/* SPDX-License-Identifier: Apache-2.0 */
/* Written for dpuflow's simulator: the names, values and signatures of DOCA's documented interface that it has. */
#ifndef SIMULATED_DOCA_ERROR_H
#define SIMULATED_DOCA_ERROR_H

typedef enum {
	DOCA_SUCCESS = 0,
	DOCA_ERROR_UNKNOWN = 1,
	DOCA_ERROR_NOT_PERMITTED = 2,
	DOCA_ERROR_IN_USE = 3,
	DOCA_ERROR_NOT_SUPPORTED = 4,
	DOCA_ERROR_AGAIN = 5,
	DOCA_ERROR_INVALID_VALUE = 6,
	DOCA_ERROR_NO_MEMORY = 7,
	DOCA_ERROR_INITIALIZATION = 8,
	DOCA_ERROR_NOT_FOUND = 16,
	DOCA_ERROR_IO_FAILED = 17,
	DOCA_ERROR_BAD_STATE = 18,
	DOCA_ERROR_DRIVER = 21,
	DOCA_ERROR_FULL = 24,
} doca_error_t;

const char *doca_error_get_name(doca_error_t error);
const char *doca_error_get_descr(doca_error_t error);

#endif
