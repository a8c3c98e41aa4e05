/* job.c LATE_RANK LATE_MS: 24 all_reduce operations, 20 ms of work before each; stderr says when it was entered. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int main(int argc, char **argv)
{
	static float in[16384], out[16384];
	struct timespec now, work = { 0, 20 * 1000000L };
	int rank, step;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	if (rank == atoi(argv[1]))
		work.tv_nsec += atol(argv[2]) * 1000000L;
	for (step = 0; step < 24; step++) {
		nanosleep(&work, NULL);
		clock_gettime(CLOCK_REALTIME, &now);
		fprintf(stderr, "enter %d %d %ld\n", rank, step, now.tv_sec * 1000000000L + now.tv_nsec);
		MPI_Allreduce(in, out, 16384, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
	}
	MPI_Finalize();
	return 0;
}
