/* An armed program that does what is hard on a library inside it: `armed fork | exec | storm`. Exit code 0: all went well. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static volatile long children, interrupts, alarms, elsewhere;
static pthread_t main_thread;

static void count(int number)
{
	int before = errno;
	if (!pthread_equal(pthread_self(), main_thread))
		elsewhere++;
	if (number == SIGCHLD)
		while (waitpid(-1, NULL, WNOHANG) > 0)
			children++;
	else if (number == SIGINT)
		interrupts++;
	else
		alarms++;
	errno = before;
}

static int start_cuda(void)
{
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
	int (*start)(unsigned) = cuda ? (int (*)(unsigned))dlsym(cuda, "cuInit") : NULL;
	return !start || start(0);
}

static int is_armed(void)
{
	char line[4096];
	int found = 0;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (maps && fgets(line, sizeof line, maps))
		found |= strstr(line, "/memfd:argus-cupti") != NULL;
	if (maps)
		fclose(maps);
	return found;
}

static int forks(void)
{
	for (int i = 0; i < 20; i++) {
		pid_t child = fork();
		int status;
		if (child == 0)
			_exit(is_armed() ? 3 : system("true") != 0);
		if (child < 0 || waitpid(child, &status, 0) != child || status)
			return 10 + status;
	}
	return is_armed() ? 0 : 4;
}

static int storms(void)
{
	struct itimerval timer = {{0, 500}, {0, 500}};
	struct sigaction action = {.sa_handler = count, .sa_flags = SA_RESTART};
	main_thread = pthread_self();
	sigaction(SIGCHLD, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &timer, NULL);
	for (int i = 0; i < 200; i++) {
		pid_t child = fork();
		if (child == 0)
			_exit(0);
		kill(getpid(), SIGINT);
	}
	for (int i = 0; i < 400 && children < 200; i++)
		usleep(10000);
	printf("children %ld interrupts %ld alarms %ld elsewhere %ld\n", children, interrupts, alarms, elsewhere);
	return children != 200 || interrupts != 200 || alarms < 10 || elsewhere;
}

int main(int words, char **word)
{
	if (words < 2 || start_cuda())
		return 64;
	if (!is_armed())
		return 65;
	if (!strcmp(word[1], "fork"))
		return forks();
	if (!strcmp(word[1], "storm"))
		return storms();
	if (!strcmp(word[1], "exec")) {
		int left = words > 2 ? atoi(word[2]) : 5;
		char next[16];
		snprintf(next, sizeof next, "%d", left - 1);
		if (left)
			execl("/proc/self/exe", word[0], "exec", next, (char *)NULL);
		return left != 0;
	}
	return 66;
}
