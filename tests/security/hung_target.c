/* A program whose code, or memory, lies where somebody else may refuse to answer.
 *
 * hung_target library FILE: loads FILE, and calls work() of it for ever; with "read" on its standard input a second thread
 * opens FILE and reads it.
 * hung_target memory FILE: has a page of FILE in its memory that it has not touched, and sleeps. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *path;

static void *read_it(void *unused)
{
	char text[16];

	if (fgets(text, sizeof(text), stdin) != NULL) {
		int fd = open(path, O_RDONLY);

		if (fd >= 0 && read(fd, text, sizeof(text)) < 0)
			perror("read");
	}
	return unused;
}

int main(int count, char **words)
{
	pthread_t thread;

	if (count == 3 && strcmp(words[1], "library") == 0) {
		void *library = dlopen(path = words[2], RTLD_NOW);
		void (*work)(void) = library == NULL ? NULL : (void (*)(void))dlsym(library, "work");

		if (work == NULL || pthread_create(&thread, NULL, read_it, NULL) != 0)
			return 1;
		work();
		puts("ready");
		fflush(stdout);
		for (;;)
			work();
	}
	if (count == 3 && strcmp(words[1], "memory") == 0) {
		char *page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, open(words[2], O_RDONLY), 0);

		if (page == MAP_FAILED)
			return 2;
		puts("ready");
		fflush(stdout);
		for (;;)
			pause();
	}
	return 3;
}
