/* Records that cross from the kernel to user space. argus/model/records.py mirrors every struct here;
 * tests/unit/model/test_records.py compiles this header and compares sizes and offsets.
 *
 * Rings hold records of one size each, so that user space can view a ring as one structured array.
 * Times are CLOCK_MONOTONIC nanoseconds. A duration of -1 means "not measured", which differs from 0.
 */
#ifndef ARGUS_H
#define ARGUS_H

#ifndef __BPF__
#include <stdint.h>
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t s32;
typedef int64_t s64;
#endif

/* argus_launch.flags, argus_collective.flags, argus_control.flags, argus_mark.flags */
#define ARGUS_F_IN_NCCL 1      /* made by NCCL itself, inside a collective call */
#define ARGUS_F_IN_GROUP 2     /* between ncclGroupStart and ncclGroupEnd of this thread */
#define ARGUS_F_READ_FAULT 4   /* an argument in user memory could not be read: fields may be 0 */
#define ARGUS_F_UNFINISHED 8   /* the call had not returned when its thread ended or Argus stopped */
#define ARGUS_F_NAME_ADDRESS 16 /* a name that is not, or not wholly, in data: name_address is where it lies */

/* How a hooked function is described to the programs: one 64-bit attach cookie (argus/model/calls.py packs it).
 * Argument numbers count integer arguments from 0; 15: the function has none such. */
#define ARGUS_CALL(c) ((u8)((c) & 0xff))
#define ARGUS_SHAPE(c) (((c) >> 8) & 0x3f)
#define ARGUS_LAYER(c) (((c) >> 14) & 7)
#define ARGUS_HAS_EXIT(c) (((c) >> 17) & 1)
#define ARGUS_SCALE(c) (((c) >> 18) & 3)      /* log2 of the bytes of an element */
#define ARGUS_ARG(c, i) (((c) >> (20 + 4 * (i))) & 15)
#define ARGUS_OFFSET(c) (((c) >> 52) & 0xff)  /* of the extent inside a struct argument; a GEMM's number of the batch's size */
#define ARGUS_DIMS(c) (((c) >> 60) & 3)
#define ARGUS_FILE(c) (((c) >> 44) & 0xff)    /* the file's slot: where maps hold what is known of it */
#define ARGUS_FILES 256                       /* slots; files for which there is none share the last one */
#define ARGUS_IS_MODULE(c) (((c) >> 62) & 1)  /* loads code: reported even inside another call */
#define ARGUS_IS_MOVED(c) ((c) >> 63)         /* the probe is behind a push or the like: map "below" has how far */

#define ARGUS_LAYER_DRIVER 0
#define ARGUS_LAYER_RUNTIME 1
#define ARGUS_LAYER_NCCL 2
#define ARGUS_LAYER_TORCH 3
#define ARGUS_LAYER_CUBLAS 4
#define ARGUS_LAYER_NVTX 5

enum argus_shape {
	ARGUS_S_ARGS,          /* plain arguments: handle, stream, bytes, out (pointer to the handle made), direction */
	ARGUS_S_LAUNCH_DRIVER, /* cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, ...) */
	ARGUS_S_LAUNCH_DRIVER_EX,
	ARGUS_S_LAUNCH_RUNTIME, /* cudaLaunchKernel(func, dim3, dim3, args, shared, stream) */
	ARGUS_S_LAUNCH_RUNTIME_EX,
	ARGUS_S_AREA,          /* as ARGS, bytes = argument "bytes" times the next one */
	ARGUS_S_EXTENT,        /* as ARGS, bytes = product of a struct's extent (argument 0 points at the struct) */
	ARGUS_S_COLLECTIVE,    /* count, dtype, redop, peer, comm, stream */
	ARGUS_S_P2P,           /* the same, numbered apart */
	ARGUS_S_GROUP_START,
	ARGUS_S_GROUP_END,
	ARGUS_S_COMM_INIT,     /* (comm *, nranks, id by value, rank, ...) */
	ARGUS_S_COMM_INIT_SCALABLE, /* (comm *, nranks, rank, nids, ids *, ...) */
	ARGUS_S_COMM_INIT_ALL, /* (comms *, ndev, devlist *) */
	ARGUS_S_COMM_SPLIT,    /* (comm, color, key, newcomm *, ...) */
	ARGUS_S_COMM_SHRINK,   /* (comm, exclude *, n, newcomm *, ...) */
	ARGUS_S_COMM_END,      /* (comm) */
	ARGUS_S_COMM_COUNT,    /* (comm, int *nranks) */
	ARGUS_S_COMM_RANK,     /* (comm, int *rank) */
	ARGUS_S_NAME_OUT,      /* (kernel *, module, name) */
	ARGUS_S_KERNEL_OUT,    /* (function *, kernel) */
	ARGUS_S_NAME_HOST,     /* (module, host stub, device function, name) */
	ARGUS_S_C10D,          /* a process group's method: tensors, how many vectors they lie in, none, peer, process group */
	ARGUS_S_C10D_P2P,      /* the same, numbered apart */
	ARGUS_S_MARK,          /* handle, name, whether the handle is behind a pointer, enum argus_name_form */
	ARGUS_S_GEMM,          /* m, n, k, type of A; the batch's size is argument ARGUS_OFFSET, 0: there is none */
	ARGUS_S_MATMUL,        /* layout descriptors of A, B and D */
	ARGUS_S_ATTENTION,     /* query (key and value follow), whether causal, and two that are to be empty: a std::optional;
				  the second one's number is ARGUS_OFFSET */
};

/* How a mark's name is passed. */
enum argus_name_form {
	ARGUS_N_STRING,     /* std::string * */
	ARGUS_N_CHARS,      /* char * */
	ARGUS_N_WIDE,       /* wchar_t * */
	ARGUS_N_ATTRIBUTES, /* nvtxEventAttributes_t * */
	ARGUS_N_OLD_STRING, /* std::string * from before C++11: one pointer, to the characters */
};

/* One CUDA call: launch, copy, synchronise, allocate, load. Ring "launches". */
struct argus_launch {
	u64 ts_ns;        /* entry */
	s64 duration_ns;  /* exit - entry, or -1: exit not traced */
	u64 handle;       /* kernel, graph, event, pointer or module, as the call has it */
	u64 stream;       /* CUstream handle; 0: the default stream */
	u64 bytes;        /* copied, set or allocated; dynamic shared memory for a kernel */
	u32 pid;          /* thread group, as the kernel's root namespace numbers it */
	u32 tid;
	u32 grid[3];
	u16 block[3];
	u8 call;          /* argus.model.calls: index of the hooked function */
	u8 flags;
	s32 result;       /* return value; 0 where the exit is not traced */
	u32 direction;    /* cudaMemcpyKind of a copy that is passed it: 1 to device, 2 to host, 3 on device, 4 by address */
	u32 reserved;
};

/* One collective operation. Ring "collectives". */
struct argus_collective {
	u64 ts_ns;
	s64 duration_ns;  /* of the CPU call */
	u64 comm;         /* ncclComm_t, or c10d::ProcessGroup, of this process; 0 for group calls */
	u64 stream;       /* a process group: its own count of collectives at entry, plus 1; 0: not known */
	u64 count;        /* elements, as passed */
	u64 seq;          /* calls on this communicator since Argus attached or it was made, from 0; own count for p2p */
	u32 pid;
	u32 tid;
	s32 peer;         /* root or peer rank; -1: none */
	s32 result;
	u8 call;
	u8 dtype;         /* ncclDataType_t, or ARGUS_TORCH_DTYPE + c10::ScalarType; 255: not known */
	u8 redop;         /* ncclRedOp_t; 255: none */
	u8 flags;
	u32 reserved;
};

/* So long that a record and the ring's header make 256 bytes: then 16 MiB hold 65,536 records. A program registers all
 * its kernels when it loads, `import torch` 40,000 within 0.1 s. Names are often longer than this: user space reads those
 * whole, where they lie. All the same a registration brings what can be read at once, and not its name's address alone:
 * records of a ring have one size, so leaving it out would save nothing, and a program that has ended cannot be asked. */
#define ARGUS_NAME_LEN 176

/* Rare events, but for the storm of registrations when a program loads: communicators made, asked and ended, kernels
 * named. Ring "control". */
struct argus_control {
	u64 ts_ns;
	s64 duration_ns;
	u64 handle;       /* communicator, kernel or module */
	u64 parent;       /* parent communicator (split), module or library of a kernel */
	u64 name_address; /* of a kernel's name, in the process; 0: none */
	u32 pid;
	u32 tid;
	s32 nranks;       /* communicator; -1: not given by the call */
	s32 rank;
	s32 color;        /* split */
	s32 key;
	s32 result;
	u8 call;
	u8 flags;
	u16 name_len;     /* bytes used in data */
	u8 data[ARGUS_NAME_LEN]; /* a communicator's 128-byte unique id, or a kernel's name */
};

/* Added to a c10::ScalarType in argus_collective.dtype. */
#define ARGUS_TORCH_DTYPE 64

#define ARGUS_MARK_NAME_LEN 96 /* "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__" has 62 */

/* A moment of PyTorch or NVTX: a range, a backward pass, a wait or a work begins or ends. Ring "marks". */
struct argus_mark {
	u64 ts_ns;
	u64 handle;       /* c10d::Work, NVTX's domain; 0: none */
	u32 pid;
	u32 tid;
	u8 call;
	u8 flags;
	u16 name_len;     /* bytes used in name; 0: none */
	u32 at_exit;      /* 1: the function returned */
	u8 name[ARGUS_MARK_NAME_LEN]; /* its beginning, if longer; with ARGUS_F_NAME_ADDRESS: where it lies */
};

#define ARGUS_MATH_WORDS 15
#define ARGUS_DESCRIPTOR_WORDS 5

/* One call of a function that multiplies matrices, with the arguments that give their sizes, as passed: user space
 * interprets them (argus/semantics/gpu/products.py). Ring "math". */
struct argus_math {
	u64 ts_ns;
	s64 duration_ns; /* ATTENTION: until the thread's next launch that it did not make; -1: it made none */
	u64 words[ARGUS_MATH_WORDS]; /* GEMM: m, n, k, type, batch. MATMUL: the beginning of each descriptor. ATTENTION: four
					sizes each of query, key and value (0: they make no sense), c10::ScalarType,
					whether causal, whether one is there that is to be empty */
	u32 pid;
	u32 tid;
	s32 result;
	u8 call;
	u8 flags;
	u16 reserved;
};

/* Hits in traced processes by the function's number, nested ones included; of exits (marks only) 256 further on. */
struct argus_hits {
	u64 of[512];
};

/* Where objects of a process's PyTorch keep things; 0: not known. */
struct argus_torch {
	u32 numel;        /* of elements, in c10::TensorImpl; its type follows */
	u32 counter;      /* of collectives, in c10d::ProcessGroupGloo */
	u32 sizes;        /* of a tensor's dimensions, in c10::TensorImpl; up to five sizes follow */
	u32 file;         /* the file's slot, plus 1; 0: there is no such file */
};

/* Map "torch_layouts", by process: what its own files say, since others may map the same library and have another version
 * beside it. A process has one PyTorch, or two. */
#define ARGUS_TORCHES 2
struct argus_torches {
	struct argus_torch of[ARGUS_TORCHES];
};

/* The rings, as the budgets of a process are numbered. */
enum argus_ring {
	ARGUS_R_LAUNCHES,
	ARGUS_R_COLLECTIVES,
	ARGUS_R_CONTROL,
	ARGUS_R_MARKS,
	ARGUS_R_MATH,
	ARGUS_R_COUNT
};

/* What is kept of a process in maps that all processes share. */
enum argus_held {
	ARGUS_H_CALLS,     /* CUDA and NCCL calls until they return: "inflight" */
	ARGUS_H_CONTROL,   /* calls about communicators and names: "control_inflight" */
	ARGUS_H_MATH,      /* products and attentions: "math_inflight" */
	ARGUS_H_GROUPS,    /* threads in groups of NCCL: "group_depth" */
	ARGUS_H_SEQUENCES, /* communicators: "sequences" */
	ARGUS_H_COUNT
};

/* A traced process: map "targets", by its number. Each process has a token bucket for each ring, kept as the time at which
 * the records that it has written are paid off. */
struct argus_target {
	u64 paid_ns[ARGUS_R_COUNT];
	u64 refused;      /* records that were not written, since they were above its budget */
	u64 hits;         /* of probes, but those of names and communicators, which come in bursts; calls inside other calls included */
	u64 ignored;      /* 1: nothing of it is recorded any more; user space sets it */
	u64 pending_refused; /* calls that were not remembered until their exit, since it had its share of room for them */
	u64 seq_refused;  /* the same for numbers of collectives */
	u64 owner_refused; /* records that were not written, since they were above its owner's share of a ring */
	u64 trap_ns;      /* what the traps of "hits" cost it, by "trap_prices" */
	s32 held[ARGUS_H_COUNT]; /* entries that are there now */
	s32 granted[ARGUS_H_COUNT]; /* entries that count for its owner: those, and some in advance */
	u32 owner;        /* its user in its container: map "owners" */
	u32 user;         /* its user in all containers: map "owners" */
};

/* Counters, per CPU. Those marked "loss" make coverage incomplete when they are not 0. */
enum argus_counter {
	ARGUS_C_LAUNCHES,            /* records written to "launches" */
	ARGUS_C_COLLECTIVES,
	ARGUS_C_CONTROL,
	ARGUS_C_LAUNCHES_DROPPED,    /* loss: ring full */
	ARGUS_C_COLLECTIVES_DROPPED, /* loss */
	ARGUS_C_CONTROL_DROPPED,     /* loss */
	ARGUS_C_NESTED,              /* calls made by another traced call, and so not counted again */
	ARGUS_C_PENDING_FULL,        /* loss: no room to remember a call until its exit */
	ARGUS_C_EXIT_UNMATCHED,      /* exits whose entry came before Argus attached */
	ARGUS_C_UNFINISHED,          /* calls that had not returned when their thread ended */
	ARGUS_C_EXIT_MISSED,         /* loss: an entry whose exit never came (its duration is unknown) */
	ARGUS_C_READ_FAULT,          /* loss: arguments in user memory that could not be read */
	ARGUS_C_SEQ_FULL,            /* loss: too many communicators to number their calls, or threads in groups */
	ARGUS_C_INIT_ALL_CUT,        /* loss: communicators beyond the 16 first of one ncclCommInitAll */
	ARGUS_C_HITS,                /* probe hits in traced processes, nested ones included: the sum of argus_hits */
	ARGUS_C_NAMES_READ_LATER,    /* names of kernels left to user space: not in memory yet, or too long for a record */
	ARGUS_C_MARKS,
	ARGUS_C_MARKS_DROPPED,       /* loss */
	ARGUS_C_MATH,
	ARGUS_C_MATH_DROPPED,        /* loss */
	ARGUS_C_RECORDS_OVER_BUDGET,         /* loss, of the process's own job: the sum of argus_target.refused */
	ARGUS_C_HITS_IGNORED,        /* probe hits in processes that are not traced, or no longer */
	ARGUS_C_PENDING_OVER_SHARE,  /* loss, of the process's own job: the sum of argus_target.pending_refused */
	ARGUS_C_SEQ_OVER_SHARE,      /* loss, of the process's own job: the sum of argus_target.seq_refused */
	ARGUS_C_RECORDS_OVER_SHARE,  /* loss, of the process's own job: the sum of argus_target.owner_refused */
	ARGUS_C_LAYOUT_UNKNOWN,      /* loss: PyTorch's calls of a process of whose own files it is not known yet how tensors are read */
	ARGUS_C_COUNT
};

/* A user in a container, or in all of them: map "owners". While several are traced, the processes of each fill one window of
 * a ring after the other. A window is over when all that was in the ring as it began has been read. */
#define ARGUS_OWNERS 2048
struct argus_owner {
	u64 began[ARGUS_R_COUNT]; /* position in the ring up to which was written then */
	u64 bytes[ARGUS_R_COUNT]; /* written since then */
	u64 lost[ARGUS_C_COUNT];  /* losses of its processes in this container, but those that are counted in argus_target */
};

/* What calls of files in the last slot cost an owner's processes, ns, by the call's number: the highest price of such files
 * that they map. 0: not known. Map "shared_prices", by the owner's number. */
struct argus_prices {
	u32 of[256];
};

/* What was granted to the processes of each of them, and at place ARGUS_OWNERS to all: map "rooms". User space counts it
 * again when a process is traced no more. */
struct argus_room {
	s32 granted[ARGUS_H_COUNT];
};

#endif
