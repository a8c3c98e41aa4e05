/*
 * job.c LATE_RANK LATE_MS [STEPS [FROM]]: STEPS (24) all_reduce operations, 20 ms of work before each, LATE_MS
 * more in the late rank from step FROM (0) on; stderr says in the end when each was entered (whoever reads
 * it would take this process's CPU between the time and the first packet).
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int main(int argc, char **argv)
{
	static float in[16384], out[16384];
	static struct timespec entered[100000];
	struct timespec work = { 0, 20 * 1000000L };
	int rank, step, steps = argc > 3 ? atoi(argv[3]) : 24, from = argc > 4 ? atoi(argv[4]) : 0;
	long late_ns;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	late_ns = rank == atoi(argv[1]) ? atol(argv[2]) * 1000000L : 0;
	for (step = 0; step < steps; step++) {
		work.tv_nsec = 20 * 1000000L + (step < from ? 0 : late_ns);
		nanosleep(&work, NULL);
		clock_gettime(CLOCK_REALTIME, &entered[step]);
		MPI_Allreduce(in, out, 16384, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
	}
	for (step = 0; step < steps; step++)
		fprintf(stderr, "enter %d %d %ld\n", rank, step,
			entered[step].tv_sec * 1000000000L + entered[step].tv_nsec);
	MPI_Finalize();
	return 0;
}
