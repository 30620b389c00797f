/* A process that whoever injects it should not trust: `python3.14 MODE [FILE]`. It writes a line to RUNS whenever it is
 * run, and to EVENTS what it saw; SIGUSR1 ends it, SIGUSR2 makes it another program.
 *   waits      does nothing more
 *   folders    exchanges each new folder of /tmp for one of links that lead to FILE (renameat2, on inotify)
 *   descriptor puts FILE, opened for reading, in the place of each new file in memory (dup2)
 *   stack      its stack pointer is no address
 *   exchange   maps FILE over its stack once LOOKED is there
 *   above      its stack is memory of no file, and FILE is mapped right above it */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *file;
static char **own;
static volatile sig_atomic_t ending, changing;

static void note(const char *place, const char *text)
{
	int to = open(place, O_WRONLY | O_APPEND | O_CREAT, 0666);
	if (to < 0 || write(to, text, strlen(text)) < 0)
		_exit(67);
	close(to);
}

static void on_end(int number)
{
	(void)number;
	ending = 1;
}

static void on_change(int number)
{
	(void)number;
	changing = 1;
}

static void *exchange(void *unused)
{
	static const char *const names[] = {"libargus_cupti.so", "libargus_cupti_inject.so", "start.py"};
	char events[65536] __attribute__((aligned(8))), path[4096];
	int watch = inotify_init1(IN_CLOEXEC);
	mkdir("/tmp/links", 0777);
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		snprintf(path, sizeof path, "/tmp/links/%s", names[i]);
		if (symlink(file, path))
			_exit(68);
	}
	inotify_add_watch(watch, "/tmp", IN_CREATE);
	puts("ready");
	fflush(stdout);
	for (;;) {
		ssize_t got = read(watch, events, sizeof events);
		for (char *at = events; at < events + got;) {
			struct inotify_event *event = (struct inotify_event *)at;
			snprintf(path, sizeof path, "/tmp/%s", event->name);
			renameat2(AT_FDCWD, path, AT_FDCWD, "/tmp/links", RENAME_EXCHANGE);
			note(EVENTS, "a file was made in /tmp\n");
			at += sizeof *event + event->len;
		}
	}
	return unused;
}

static void *replace(void *unused)
{
	int with = open(file, O_RDONLY | O_NONBLOCK), next = dup(with);
	if (with < 0)
		_exit(69);
	close(next); /* the number that a new file will have */
	puts("ready");
	fflush(stdout);
	for (;;)
		if (fcntl(next, F_GETFD) >= 0)
			dup2(with, next);
	return unused;
}

#define SIZE (1 << 20)

static char *own_stack;

static void map_stack(int from)
{
	int flags = MAP_PRIVATE | MAP_FIXED | (from < 0 ? MAP_ANONYMOUS : 0);
	if (mmap(own_stack, SIZE, PROT_READ | PROT_WRITE, flags, from, 0) == MAP_FAILED)
		_exit(70);
}

static void *exchange_stack(void *from)
{
	while (access(LOOKED, F_OK))
		usleep(1000);
	map_stack(*(int *)from);
	return NULL;
}

/* Runs on a stack that it never touches: what lies there does not come. */
static void run_on(const char *mode)
{
	static int from;
	pthread_t thread;
	from = open(file, O_RDONLY);
	own_stack = mmap(NULL, 2 * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (from < 0 || own_stack == MAP_FAILED)
		_exit(71);
	puts("ready");
	fflush(stdout);
	char *top = own_stack + SIZE / 2;
	if (strcmp(mode, "exchange") == 0)
		pthread_create(&thread, NULL, exchange_stack, &from);
	else {
		top = own_stack + SIZE - 64;
		if (mmap(own_stack + SIZE, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, from, 0) == MAP_FAILED)
			_exit(72);
	}
	__asm__ volatile("mov %0, %%rsp\n 1: pause\n jmp 1b" ::"r"(top));
}

int main(int count, char **words)
{
	pthread_t thread;
	const char *mode = count > 1 ? words[1] : "";
	own = words;
	file = count > 2 ? words[2] : "";
	char line[64];
	snprintf(line, sizeof line, "run by %d\n", (int)geteuid());
	note(RUNS, line);
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
	if (!cuda || ((int (*)(unsigned))dlsym(cuda, "cuInit"))(0))
		return 65;
	signal(SIGUSR1, on_end);
	signal(SIGUSR2, on_change);
	if (!strcmp(mode, "folders"))
		pthread_create(&thread, NULL, exchange, NULL);
	else if (!strcmp(mode, "descriptor"))
		pthread_create(&thread, NULL, replace, NULL);
	else if (!strcmp(mode, "exchange") || !strcmp(mode, "above"))
		run_on(mode);
	else {
		puts("ready");
		fflush(stdout);
	}
	if (!strcmp(mode, "stack"))
		__asm__ volatile("mov $-16, %rsp\n 1: jmp 1b");
	while (!ending) {
		struct timespec time = {0, 10000000};
		nanosleep(&time, NULL);
		if (changing) {
			sigset_t none;
			sigemptyset(&none);
			sigprocmask(SIG_SETMASK, &none, NULL);
			execl("/proc/self/exe", own[0], "waits", "changed", NULL);
		}
	}
	return 0;
}
