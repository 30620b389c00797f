/* A process whose memory looks as if CPython ran in it: thread states, frames and code objects of a known shape, or broken
 * in one known way. Its main thread burns CPU meanwhile. tests/kernel/test_stack_probes.py holds the offsets.
 *
 *   stacks_fake SHAPE DEPTH
 *
 * Prints where things are once its main thread is in its loop, then runs until killed, or until a line comes on stdin,
 * which ends a collection (gc). */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint64_t u64;

struct code {
	u64 refcount, type, size, name, qualname, filename, linetable;
	uint32_t firstlineno, pad;
	uint16_t instructions[4096];
};
struct frame {
	u64 code, previous, instr;
	uint8_t owner, pad[7];
};
struct thread {
	u64 next, id, native_id, frame;
};
struct interpreter {
	u64 next, threads;
};
static struct {
	u64 interpreters, gil_holder;
	uint32_t gil_locked, collecting;
} runtime;

static struct interpreter interpreters[2];
static struct thread threads[256];
static struct frame frames[1024];
static struct code codes[512];
static u64 code_type[8], other_type[8], cframe[2];
static volatile int stop, in_loop;
static char places[256];

static void *listen_to(void *unused)
{
	char line[16];
	while (!in_loop)
		sched_yield();
	puts(places); /* a sample taken before would be of main, and not of the loop */
	while (fgets(line, sizeof(line), stdin)) {
		/* 2: it collects still, and another thread has the GIL */
		runtime.gil_locked = line[0] != '2';
		runtime.collecting = line[0] != '0';
		printf("collecting %d\n", runtime.collecting);
	}
	return unused;
}

static __attribute__((noinline)) void burn(void)
{
	in_loop = 1;
	for (volatile u64 i = 0; !stop; i++)
		;
}

/* The register holds something else, as in most code: an address that may be readable. */
static __attribute__((noinline)) void burn_without_frame(u64 value)
{
	static u64 words[2] = {0, 0x7000000000};
	if (!value)
		value = (u64)words;
	asm volatile("mov %1, %%rbp\n movl $1, %0\n1: pause\n jmp 1b" : "=m"(in_loop) : "r"(value) : "memory");
}

int main(int argc, char **argv)
{
	const char *shape = argv[1];
	int depth = atoi(argv[2]), used = 0;
	int is(const char *name) { return strcmp(shape, name) == 0; }

	/* CPython lays a caller's frame below its callee's. */
	struct frame *frame_of(int i) { return is("downward") || is("recursive") ? &frames[1023 - i] : &frames[i]; }

	for (int i = 0; i < depth; i++) {
		int of = is("recursive") ? i % 2 : i;
		struct code *code = &codes[of % 512];
		*code = (struct code){1, (u64)code_type, 4096, 0x1000 + of, 0x2000 + of, 0x3000 + of, 0x4000 + of, 100 + of, 0, {0}};
		struct frame *frame = frame_of(used++);
		frame->code = (u64)code;
		frame->instr = is("index") ? (u64)(i + 1) : (u64)&code->instructions[i];
		frame->owner = 0;
		if (is("entry_is_frame"))
			frame->owner = i == 2 || i == depth - 1 ? 1 : 0;
		else if (!is("index") && (i == 2 || i == depth - 1))
			frame_of(used++)->owner = i == 2 ? 3 : 4; /* an entry frame, which is no Python frame */
	}
	for (int i = 0; i < used; i++)
		frame_of(i)->previous = i + 1 < used ? (u64)frame_of(i + 1) : 0;

	char *unmapped = mmap(0, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (is("wrong_type"))
		codes[depth / 2].type = (u64)other_type;
	if (is("no_bottom"))
		frames[used - 2].previous = 0;
	if (is("unmapped_frame"))
		frames[used / 2].previous = (u64)unmapped;
	if (is("unmapped_code"))
		frames[used / 2].code = (u64)unmapped;
	if (is("circle"))
		frames[used / 2].previous = (u64)&frames[used / 2 - 1];
	if (is("circle_of_one"))
		frames[used / 2].previous = (u64)&frames[used / 2];
	if (is("circle_of_all"))
		frames[used - 1].previous = (u64)&frames[0];
	if (is("instr_before"))
		frames[0].instr -= 64;
	if (is("instr_after"))
		frames[0].instr += 2 * 4096;
	if (is("not_begun"))
		frames[0].instr = (u64)codes[0].instructions - 2;
	if (is("tagged"))
		for (int i = 0; i < used; i++)
			frames[i].code |= 1;

	int states = is("long_list") ? 256 : is("short_list") ? 100 : 3;
	for (int i = 0; i < states; i++)
		threads[i] = (struct thread){i + 1 < states ? (u64)&threads[i + 1] : 0, 0, 0x70000000 + i, 0};
	struct thread *mine = &threads[is("stranger") ? 255 : states - 1];
	mine->native_id = syscall(SYS_gettid);
	mine->id = pthread_self();
	mine->frame = is("idle") ? 0 : is("unmapped_first") ? (u64)unmapped : (u64)frame_of(0);
	if (is("cframe")) {
		cframe[1] = mine->frame;
		mine->frame = (u64)cframe;
	}
	if (is("stranger"))
		mine->native_id = 1;
	interpreters[0] = (struct interpreter){0, (u64)&threads[0]};
	runtime.interpreters = (u64)&interpreters[0];
	if (is("second_interpreter")) {
		interpreters[1] = (struct interpreter){(u64)&interpreters[0], 0};
		runtime.interpreters = (u64)&interpreters[1];
	}
	if (is("gil") || is("gc")) {
		runtime.gil_holder = (u64)mine;
		runtime.gil_locked = 1;
	}
	if (is("gil_released"))
		runtime.gil_holder = (u64)mine;
	if (is("gil_of_another")) {
		runtime.gil_holder = (u64)&threads[0];
		runtime.gil_locked = runtime.collecting = 1;
	}
	u64 in_pthread = 0;
	for (; in_pthread < 2048 && *(int *)((char *)pthread_self() + in_pthread) != getpid(); in_pthread += 4)
		;
	snprintf(places, sizeof(places), "%lu %lu %lu %lu %lu %lu", (u64)&runtime, (u64)code_type, (u64)codes,
	         sizeof(struct code), (u64)mine, in_pthread);
	setvbuf(stdout, 0, _IOLBF, 0);
	pthread_t listener;
	pthread_create(&listener, 0, listen_to, 0);
	if (is("no_frame_pointer"))
		burn_without_frame(argc > 3 ? strtoull(argv[3], 0, 0) : 0);
	burn();
	return argc;
}
