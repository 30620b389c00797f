/* Records of the stack sampler that cross from the kernel to user space, and what user space passes to it.
 * argus/model/records.py mirrors every struct here; tests/unit/model/test_records.py compiles this header and compares.
 *
 * Times are CLOCK_MONOTONIC nanoseconds. Process and thread numbers are those of the kernel's root namespace.
 */
#ifndef ARGUS_STACKS_H
#define ARGUS_STACKS_H

#include "argus.h"

#define ARGUS_NO_OFFSET 0xffff       /* a field that this version of CPython does not have */
#define ARGUS_PYTHON_FRAMES 256      /* deepest Python stack that is kept: the frames nearest to the leaf */
#define ARGUS_NATIVE_FRAMES 64

/* How to walk one process's interpreter. Map "pythons", key: process. argus/capture/python/interpreter.py fills it. */
struct argus_python {
	u64 runtime;              /* address of _PyRuntime */
	u64 runtime_end;          /* its end: a futex inside is the GIL's */
	u64 code_type;            /* address of PyCode_Type */
	u64 gil_holder;           /* address of the pointer to the thread state that holds the GIL (or held it last); 0: unknown */
	u64 gil_locked;           /* address of the int that is not 0 while it is held; 0: unknown, or gil_holder is 0 then */
	u64 gc_collecting;        /* address of the int that is not 0 while garbage is collected; 0: unknown */
	u64 ns_dev, ns_ino;       /* PID namespace of the process (stat of /proc/PID/ns/pid) */
	u64 eval_begin, eval_end; /* the eval loop's code: where in it a thread is says nothing that its Python frames do not */
	u16 interp_head;          /* in _PyRuntime: the newest interpreter */
	u16 interp_next;          /* in an interpreter: the next one */
	u16 threads_head;         /* in an interpreter: its newest thread state */
	u16 thread_next;          /* in a thread state */
	u16 thread_id;            /* in a thread state: pthread_self() */
	u16 native_thread_id;     /* in a thread state: thread number in the process's namespace; ARGUS_NO_OFFSET before 3.11 */
	u16 pthread_tid;          /* in struct pthread: thread number in the process's namespace; ARGUS_NO_OFFSET: unknown */
	u16 thread_frame;         /* in a thread state: frame, or cframe */
	u16 cframe_frame;         /* in the cframe: current frame; ARGUS_NO_OFFSET: thread_frame is the frame itself */
	u16 frame_code;           /* in a frame: the code object (f_executable) */
	u16 frame_previous;       /* in a frame */
	u16 frame_instr;          /* in a frame: index or address of the instruction */
	u16 frame_owner;          /* in a frame: the byte that marks entry frames; ARGUS_NO_OFFSET: none does */
	u16 frame_bytes;          /* how much of a frame holds all of these; at most 128 */
	u16 code_firstlineno;     /* in a code object */
	u16 code_filename;
	u16 code_name;
	u16 code_qualname;        /* ARGUS_NO_OFFSET before 3.11 */
	u16 code_linetable;
	u16 code_adaptive;        /* where the instructions begin; ARGUS_NO_OFFSET: frame_instr is an index */
	u16 code_bytes;           /* how much of a code object holds all of these, from 0; at most 256 */
	u8 owner_entry;           /* value of the byte at frame_owner of an entry frame */
	u8 owner_entry_2;         /* another such value; the same again if there is none */
	u8 entry_is_frame;        /* 1: an entry frame is a Python frame like others (3.11); 0: it has none of its own (3.12) */
	u8 instr_shift;           /* log2 of the bytes of one unit of an index (3.10: 1) */
	u8 code_tag_bits;         /* low bits of the code pointer that are no part of it (3.14: 1 or 2 as built) */
	u8 major, minor;
	u8 unicode_ascii;         /* in a str: its characters, if all are ASCII */
	u8 unicode_compact;       /* in a str: its characters, else */
	u8 unicode_kind_shift;    /* in the state of a str: first bit of its kind; compact and ASCII follow its three bits */
	u8 reserved[2];
};

/* One Python frame, leaf first. */
struct argus_frame {
	u64 code;                 /* address of the code object */
	u64 check;                /* of the code object's pointers to its names and tables: detects a reused address */
	u64 content;              /* of what they point to, at that moment: number of the struct argus_code that has it; 0: it could
	                           * not be read */
	u32 instruction;          /* byte offset of the last instruction; -1: none yet */
	u32 firstlineno;          /* bit 31 (ARGUS_FRAME_ENTRY): C code called in here */
};
#define ARGUS_FRAME_ENTRY 0x80000000u /* before 3.11 every frame is one: each call of Python by Python goes through C */

/* What a code object is called and how its lines lie, as read while the thread ran in it: the object may be gone when user
 * space looks. Ring "codes", before the first stack that names it: this header, then table_bytes of the line table's
 * object. Objects are as they lie in memory, from their first byte on, and end early where they are longer. */
#define ARGUS_CODE_NAME 256
#define ARGUS_CODE_FILE 512
#define ARGUS_CODE_TABLE 16384 /* 14 of PyTorch 2.13's 68,755 code objects have more */
struct argus_code {
	u64 code;
	u64 check;
	u64 content;
	u32 pid;
	u32 table_bytes;
	u32 name_bytes;           /* how much of each was there */
	u32 file_bytes;
	u8 name[ARGUS_CODE_NAME]; /* a str: the qualified name, or before 3.11 the name */
	u8 file[ARGUS_CODE_FILE]; /* a str */
};

/* A stack that has not been seen before, or that user space may have missed. Ring "stacks": this header, then
 * python_frames of struct argus_frame, then native_frames of u64, all leaf first. */
struct argus_stack {
	u64 stack;                /* number of the stack: a hash of all that follows, and of the process */
	u64 ts_ns;
	u32 pid;
	u32 tid;
	u16 python_frames;
	u16 native_frames;
	u16 flags;                /* ARGUS_STACK_* */
	u16 reserved;
};
#define ARGUS_STACK_PYTHON 1           /* the thread has a Python stack, and it was walked to its end */
#define ARGUS_STACK_PYTHON_CUT 2       /* more than ARGUS_PYTHON_FRAMES deep: the frames nearest to the root are missing */
#define ARGUS_STACK_PYTHON_REJECTED 4  /* the thread has a Python stack that could not be read at that moment: none is given */
#define ARGUS_STACK_NATIVE_CUT 8       /* ARGUS_NATIVE_FRAMES were not enough */
#define ARGUS_STACK_KERNEL 16          /* the thread was in the kernel: native frames are where it entered it */
#define ARGUS_STACK_IDLE_PYTHON 32     /* it has a thread state, and no frame: no Python code runs in it */

#define ARGUS_WINDOW_BITS 27       /* 134 ms: short against a step, long against a sample */

/* Samples of one stack in one thread during one window, counted in the kernel: a row of struct argus_log. */
struct argus_count_key {
	u64 stack;                /* 0: off the CPU for long, with no stack taken */
	u32 pid;
	u32 tid;
	u32 what;                 /* ARGUS_WHAT_*, and the system call */
	u32 window;               /* when, in units of 2^ARGUS_WINDOW_BITS ns */
};
struct argus_count {
	u64 count;                /* samples, or times off the CPU */
	u64 ns;                   /* time off the CPU in all; of samples: the time that they stand for, each by the rate of its moment */
	u64 runqueue_ns;          /* of that: runnable, waiting for a CPU */
	u64 max_ns;               /* longest time off the CPU; 0 for samples */
	u64 first_ns;             /* of a sample; for time off the CPU: when it went off */
	u64 last_ns;              /* of a sample; for time off the CPU: when it came back */
};
struct argus_row {
	struct argus_count_key key;
	struct argus_count count;
};

/* What one CPU has counted, oldest first: map "logs", one for each CPU, which user space maps into its memory. Behind it lie
 * ARGUS_ROWS of struct argus_row, a power of two: row n at n % ARGUS_ROWS. Only rows from window_begin on are still
 * counted in: once that window is over, nobody writes to any that there are. */
struct argus_log {
	u64 written;              /* rows ever begun */
	u64 taken;                /* of these, how many user space has read; it sets this */
	u64 window;               /* when the newest was begun, in units of 2^ARGUS_WINDOW_BITS ns */
	u64 window_begin;         /* the first that was begun in it */
};

#define ARGUS_WHAT_SYSCALL 0xfff       /* system call number in the low bits; ARGUS_NO_SYSCALL: none */
#define ARGUS_NO_SYSCALL 0xfff
#define ARGUS_WHAT_OFF 0x1000          /* off the CPU; else a sample on it */
#define ARGUS_WHAT_PREEMPTED 0x2000    /* it went off runnable */
#define ARGUS_WHAT_UNINTERRUPTIBLE 0x4000 /* TASK_UNINTERRUPTIBLE: mostly disk, page-in */
#define ARGUS_WHAT_GIL_WAIT 0x8000     /* in a futex of the GIL */
#define ARGUS_WHAT_GIL 0x10000         /* it held the GIL */
#define ARGUS_WHAT_GC 0x20000          /* it was collecting garbage */
#define ARGUS_WHAT_KERNEL 0x40000      /* the sample hit the kernel */

/* A pause for garbage collection, from the first to the last sample that saw it. Ring "pauses". */
struct argus_pause {
	u64 begin_ns;             /* first sample in it */
	u64 end_ns;               /* last sample in it */
	u64 before_ns;            /* the sample before it on that thread: it began after this; 0: unknown */
	u64 after_ns;             /* the first sample after it: it had ended by then */
	u64 stack;                /* at the first sample */
	u64 period_ns;            /* between samples, at its end */
	u32 pid;
	u32 tid;
};

/* What both sides look at often: map "board", one entry, which user space maps into its memory. */
struct argus_board {
	u64 ended;                /* 1 once all is to end; user space sets it */
	u64 period_ns;            /* time between two samples on a CPU: what one stands for; user space sets it */
	u64 clones;               /* processes and threads that traced processes have made */
	u64 execs;                /* programs that they have executed */
};

/* Counters, per CPU. Those marked "loss" make coverage incomplete when they are not 0. */
enum argus_stack_counter {
	ARGUS_SC_SAMPLES,              /* samples of traced threads on the CPU */
	ARGUS_SC_OFF_CPU,              /* times off the CPU above the threshold */
	ARGUS_SC_OFF_CPU_NO_STACK,     /* of those: with no stack, since the thread's last walk was too recent */
	ARGUS_SC_SAMPLES_DROPPED,      /* loss: no room to count in */
	ARGUS_SC_STACKS_DROPPED,       /* ring of new stacks full: it is sent again with its next sample */
	ARGUS_SC_PAUSES_DROPPED,       /* loss: ring of pauses full */
	ARGUS_SC_THREADS_FULL,         /* loss: no room to remember a thread */
	/* The next speak of stacks taken: SAMPLES + OFF_STACKS. */
	ARGUS_SC_PYTHON,               /* with a Python stack */
	ARGUS_SC_PYTHON_CUT,           /* deeper than can be kept */
	ARGUS_SC_PYTHON_REJECTED,      /* whose Python stack failed a check: none is given rather than a wrong one */
	ARGUS_SC_PYTHON_FAULT,         /* whose Python stack could not be read (page not in memory, thread beginning) */
	ARGUS_SC_NO_THREAD_STATE,      /* of threads without Python, in a process that has it */
	ARGUS_SC_THREAD_WALKS,         /* searches of the list of thread states in the kernel */
	ARGUS_SC_THREAD_LIST_CUT,      /* searches given up: the list is too long; user space passes such threads */
	ARGUS_SC_NATIVE_CUT,           /* with more native frames than can be kept */
	ARGUS_SC_NATIVE_NONE,          /* with no native frame at all: the thread is ending */
	ARGUS_SC_STACKS_SENT,          /* stacks written to the ring */
	ARGUS_SC_OFF_STACKS,           /* stacks taken when a thread went off the CPU, however long it then was */
	ARGUS_SC_EXECS,                /* traced processes that executed another program: native only until it gets offsets */
	ARGUS_SC_CODES_SENT,           /* code objects written to their ring */
	ARGUS_SC_CODES_DROPPED,        /* ring of code objects full: user space looks into the process's memory instead */
	ARGUS_SC_OFF_CPU_GUESSED,      /* of OFF_CPU: the kernel did not report its return; its CPU time shows how long ago */
	ARGUS_SC_THREADS_OVER_SHARE,   /* loss, of the process's own job: samples and switches of threads beyond its share */
	ARGUS_SC_STACKS_FORGOTTEN,     /* stacks sent, whose place another took: they are sent again with their next sample */
	ARGUS_SC_COUNT
};

#endif
