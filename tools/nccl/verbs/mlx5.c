/* SPDX-License-Identifier: Apache-2.0 */
/* libmlx5.so.1 in name: says that no device is an mlx5 one, so that NCCL keeps to plain verbs. */
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>

bool mlx5dv_is_supported(void *device)
{
	(void)device;
	return false;
}

int mlx5dv_get_data_direct_sysfs_path(void *c, char *b, size_t n)
{
	(void)c;
	(void)b;
	(void)n;
	return ENODEV;
}

void *mlx5dv_reg_dmabuf_mr(void)
{
	errno = EOPNOTSUPP;
	return NULL;
}
