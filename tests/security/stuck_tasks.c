/* Threads that wait in the kernel, uninterruptibly, as any user can make them: stuck_tasks vfork|read|fault NUMBER [FILE] */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *how;
static int file;
static volatile char *mapped;

static void *wait_there(void *which)
{
	long place = (long)which * 4096;
	char byte = 0;
	if (!strcmp(how, "vfork")) {
		if (!vfork()) {
			sleep(60);
			_exit(0);
		}
	} else if (!strcmp(how, "read")) {
		byte = pread(file, &byte, 1, 0); /* the same page: the first waits for an answer, all others for the page */
	} else {
		byte = mapped[place];
	}
	return (void *)(long)byte;
}

int main(int argc, char **argv)
{
	int number = atoi(argv[2]);
	how = argv[1];
	if (argc > 3) {
		file = open(argv[3], O_RDONLY);
		mapped = mmap(0, number * 4096L, PROT_READ, MAP_SHARED, file, 0);
	}
	printf("ready\n");
	fflush(stdout);
	getchar(); /* until what answers for the file does not any more */
	for (long i = 0; i < number; i++) {
		pthread_t thread;
		pthread_create(&thread, 0, wait_there, (void *)i);
	}
	sleep(60);
	return 0;
}
