/* A process to be injected: `injected MODE ALARM_US SECONDS`; SIGUSR1 ends it sooner. It notices what an interruption must
 * not do to it: change a register, end a system call early, lose a signal, break the allocator or the loader. Exit code 0:
 * nothing was noticed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long alarms;

static void on_alarm(int number)
{
	(void)number;
	alarms++;
}

static volatile int ending;

static void on_end(int number)
{
	(void)number;
	ending = 1;
}

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Known values in registers over a stretch of code that makes no call. */
static int spin(void)
{
	uint64_t differ;
	__asm__ volatile("mov $0x1122334455667788, %%rax\n"
			 "movq %%rax, %%xmm0\n movq %%rax, %%xmm1\n movq %%rax, %%xmm7\n movq %%rax, %%xmm15\n"
			 "mov %%rax, %%r8\n mov %%rax, %%r15\n mov $20000, %%rcx\n"
			 "1: dec %%rcx\n jnz 1b\n"
			 "xor %%rbx, %%rbx\n"
			 "movq %%xmm0, %%rcx\n xor %%rax, %%rcx\n or %%rcx, %%rbx\n"
			 "movq %%xmm1, %%rcx\n xor %%rax, %%rcx\n or %%rcx, %%rbx\n"
			 "movq %%xmm7, %%rcx\n xor %%rax, %%rcx\n or %%rcx, %%rbx\n"
			 "movq %%xmm15, %%rcx\n xor %%rax, %%rcx\n or %%rcx, %%rbx\n"
			 "xor %%rax, %%r8\n or %%r8, %%rbx\n xor %%rax, %%r15\n or %%r15, %%rbx\n"
			 "mov %%rbx, %0"
			 : "=r"(differ)
			 :
			 : "rax", "rbx", "rcx", "r8", "r15", "xmm0", "xmm1", "xmm7", "xmm15", "cc");
	return differ != 0;
}

/* Values in the red zone, below the stack pointer. */
static int red_zone(void)
{
	uint64_t differ;
	__asm__ volatile("mov $0x5566, %%rax\n mov %%rax, -8(%%rsp)\n mov %%rax, -120(%%rsp)\n mov $20000, %%rcx\n"
			 "1: dec %%rcx\n jnz 1b\n"
			 "mov -8(%%rsp), %%rcx\n xor %%rax, %%rcx\n mov -120(%%rsp), %%rdx\n xor %%rax, %%rdx\n or %%rdx, %%rcx\n"
			 "mov %%rcx, %0"
			 : "=r"(differ)
			 :
			 : "rax", "rcx", "rdx", "cc", "memory");
	return differ != 0;
}

static int churn(void)
{
	static char *kept[512];
	for (int i = 0; i < 2000; i++) {
		size_t place = (size_t)(i * 7919 % 512), size = 16 + (size_t)(i * 31 % 9000);
		free(kept[place]);
		kept[place] = malloc(size);
		memset(kept[place], 1, size);
	}
	return 0;
}

static int load(void)
{
	void *library = dlopen("libutil.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!library)
		return 1;
	dlclose(library);
	return 0;
}

static int wait_nanosleep(void)
{
	struct timespec time = {0, 200000000};
	return nanosleep(&time, NULL) != 0;
}

static int wait_poll(void)
{
	return poll(NULL, 0, 200) != 0;
}

static int wait_epoll(void)
{
	static int set = -1;
	struct epoll_event event;
	if (set < 0)
		set = epoll_create1(0);
	return epoll_wait(set, &event, 1, 200) != 0;
}

static int wait_lock(void)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static pthread_cond_t never = PTHREAD_COND_INITIALIZER;
	struct timespec until;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_nsec += 200000000;
	if (until.tv_nsec >= 1000000000)
		until.tv_sec++, until.tv_nsec -= 1000000000;
	pthread_mutex_lock(&lock);
	int result = pthread_cond_timedwait(&never, &lock, &until);
	pthread_mutex_unlock(&lock);
	return result != ETIMEDOUT;
}

static const struct mode {
	const char *name;
	int (*work)(void);
} modes[] = {{"spin", spin},		     {"redzone", red_zone}, {"malloc", churn},	       {"loader", load},
	     {"nanosleep", wait_nanosleep}, {"poll", wait_poll},   {"epoll", wait_epoll}, {"condition", wait_lock}};

/* Whoever reads symbols opens what the loader lists: a number of a descriptor is another file by then. */
static int is_a_descriptor(struct dl_phdr_info *info, size_t size, void *unused)
{
	(void)size, (void)unused;
	return !strncmp(info->dlpi_name, "/proc", 5);
}

int main(int count, char **words)
{
	const struct mode *mode = NULL;
	long alarm_us = count > 2 ? atol(words[2]) : 0;
	double seconds = count > 3 ? atof(words[3]) : 2;
	char alternate[65536];
	stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate}, stack_then;

	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
		if (!strcmp(words[1], modes[i].name))
			mode = &modes[i];
	if (!mode)
		return 64;
	if (!getenv("NO_CUDA")) {
		void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
		int (*start)(unsigned) = cuda ? (int (*)(unsigned))dlsym(cuda, "cuInit") : NULL;
		if (!start || start(0))
			return 65;
	}
	if (getenv("SECCOMP")) {
		struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
		struct sock_fprog program = {1, &allow};
		if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
			return 66;
	}
	sigaltstack(&stack, NULL);
	struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
	sigset_t mask, mask_then;
	sigaction(SIGALRM, &action, NULL);
	signal(SIGUSR1, on_end);
	sigemptyset(&mask);
	sigaddset(&mask, SIGUSR2);
	sigprocmask(SIG_SETMASK, &mask, NULL);
	struct itimerval timer = {{0, alarm_us}, {0, alarm_us}};
	setitimer(ITIMER_REAL, &timer, NULL);
	puts("ready");
	fflush(stdout);

	double end = now() + seconds;
	long bad = 0, rounds = 0;
	for (; now() < end && !ending; rounds++)
		bad += mode->work() && !ending;
	sigprocmask(SIG_SETMASK, NULL, &mask_then);
	sigaltstack(NULL, &stack_then);
	int same = !memcmp(&mask, &mask_then, 8) && stack_then.ss_sp == alternate;
	int loads = dlopen("libutil.so.1", RTLD_NOW) != NULL;
	int listed = dl_iterate_phdr(is_a_descriptor, NULL);
	printf("rounds %ld bad %ld alarms %ld same %d loads %d listed %d\n", rounds, bad, alarms, same, loads, listed);
	return bad || !same || !loads || listed || (alarm_us && !alarms);
}
