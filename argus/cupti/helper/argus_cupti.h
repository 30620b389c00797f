/* The memory that a traced process and Argus share, and how they talk through it.
 *
 * The helper (helper.c) runs inside the traced process. When CUDA loads it, it maps the first ARGUS_CUPTI_HEAD_BYTES of an
 * anonymous file named "argus-cupti" and sleeps on `command_seq`: that is all that an armed process pays. Argus finds the
 * mapping in /proc/PID/maps, opens it through /proc/PID/map_files, writes a command and wakes the helper (futex).
 *
 * Nothing here knows how a CUPTI record looks: the sizes of records, the places of names in them, the kinds and attributes
 * to enable come from Argus with the command, chosen by the version that the helper reports.
 *
 * argus/cupti/shared.py mirrors every struct here; tests/unit/cupti/test_shared.py compiles this header and compares.
 * Words that both sides touch are read and written with atomic builtins; everything else is written by one side only, before
 * the word that announces it. */
#ifndef ARGUS_CUPTI_H
#define ARGUS_CUPTI_H

#include <stdint.h>

#define ARGUS_CUPTI_MAGIC 0x3149545055434741ull /* "AGCUPTI1" */
#define ARGUS_CUPTI_MEMFD "argus-cupti"
#define ARGUS_CUPTI_HEAD_BYTES 65536u           /* control, slots: mapped from the start */
#define ARGUS_CUPTI_SLOTS_OFFSET 32768u
#define ARGUS_CUPTI_MAX_SLOTS 256u
#define ARGUS_CUPTI_NAMES_OFFSET 65536u         /* from here on mapped at the first wake, and never unmapped */
#define ARGUS_CUPTI_NAMES_BYTES (8u << 20)
#define ARGUS_CUPTI_BUFFERS_OFFSET (ARGUS_CUPTI_NAMES_OFFSET + ARGUS_CUPTI_NAMES_BYTES)
#define ARGUS_CUPTI_MAX_KINDS 64u
#define ARGUS_CUPTI_MAX_CALLBACKS 64u
#define ARGUS_CUPTI_INDEX_DIVISOR 4u            /* a buffer of n bytes is followed by n / 4 bytes of index: u32 a record */

/* control.state. A reader sees what `reason` says about it. */
enum argus_cupti_state {
	ARGUS_CUPTI_DORMANT = 1, /* loaded, CUPTI untouched */
	ARGUS_CUPTI_PROBED = 2,  /* CUPTI found, `cupti_version` is valid; not subscribed */
	ARGUS_CUPTI_ON = 3,
	ARGUS_CUPTI_OFF = 4,     /* was on; buffers may still have to be read */
	ARGUS_CUPTI_IGNORED = 5, /* somebody else holds CUPTI */
	ARGUS_CUPTI_FAILED = 6,
	ARGUS_CUPTI_ENDED = 7,   /* the process is exiting; the last records have been handed over */
};

/* control.command. Argus writes it, then increments command_seq and wakes; the helper sets done_seq when it is through. */
enum argus_cupti_command {
	ARGUS_CUPTI_PROBE = 1,  /* load CUPTI, report its version */
	ARGUS_CUPTI_START = 2,  /* subscribe, make buffers, enable kinds */
	ARGUS_CUPTI_STOP = 3,   /* disable, flush */
	ARGUS_CUPTI_RELEASE = 4 /* all buffers were read: give the memory back */
};

/* slot.state */
enum argus_cupti_slot_state {
	ARGUS_CUPTI_FREE = 0,   /* zeroed */
	ARGUS_CUPTI_LENT = 1,   /* CUPTI fills it */
	ARGUS_CUPTI_FULL = 2,   /* CUPTI has returned it */
	ARGUS_CUPTI_READY = 3,  /* walked: index and names are in place. Argus reads it, zeroes it and sets FREE */
	ARGUS_CUPTI_CLAIMED = 4 /* was FULL: one side walks it now, and sets READY (the helper) or FREE (Argus) */
};

struct argus_cupti_layout {
	uint32_t size;     /* bytes of a record of this kind; 0: unknown, ends the walk */
	uint16_t name[2];  /* byte offsets of pointers to names; 0: none */
};

struct argus_cupti_attribute {
	uint32_t attribute;
	uint32_t bytes;    /* of the value, at most 8 */
	uint64_t value;
};

struct argus_cupti_control {
	uint64_t magic;
	uint32_t head_bytes;
	uint32_t pid;              /* as the process sees itself */
	/* -- written by the helper -- */
	uint32_t state;
	uint32_t done_seq;
	uint32_t cupti_version;    /* cuptiGetVersion; 0: not asked yet */
	int32_t cupti_result;      /* of the call that failed; 0: none */
	char reason[256];          /* why it is not on, in words; empty: no reason needed */
	char library[256];         /* the CUPTI that was found */
	uint32_t slots;            /* buffers; 0: never woken. Geometry is fixed at the first wake */
	uint32_t buffer_bytes;
	uint32_t holding;          /* 1: the process waits in cuInit for START: it has launched nothing yet */
	uint32_t reserved;
	uint64_t file_bytes;       /* of the whole mapping */
	uint64_t names_used;       /* bytes of the name table that are valid */
	uint64_t names_count;
	/* counters since the process began */
	uint64_t wakes;            /* START commands obeyed */
	uint64_t requests;         /* buffers asked for by CUPTI */
	uint64_t refused;          /* of them: no free slot, so CUPTI dropped records */
	uint64_t completed;        /* buffers returned by CUPTI */
	uint64_t strangers;        /* buffers returned that are not ours */
	uint64_t records;          /* walked */
	uint64_t unknown_bytes;    /* behind a record of an unknown kind or size: lost */
	uint64_t names_lost;       /* the name table was full */
	uint64_t cupti_dropped;    /* cuptiActivityGetNumDroppedRecords */
	uint64_t flushes;
	uint64_t callback_ns;      /* spent in buffer callbacks */
	uint64_t walk_ns;          /* CPU time spent on names and indices, in the helper's thread */
	uint64_t refused_kinds;    /* bit k: CUPTI refused to enable kind k */
	/* -- written by Argus -- */
	uint32_t command_seq;      /* futex */
	uint32_t command;
	uint32_t heartbeat;        /* changes at least twice a second while Argus lives */
	uint32_t flush_ms;
	uint32_t on_ms;            /* kinds are enabled in the first on_ms of every period_ms of CLOCK_MONOTONIC; */
	uint32_t period_ms;        /* 0: always */
	uint32_t walks_outside;    /* 1: Argus walks FULL buffers and reads names itself; the helper only what is left at exit */
	uint32_t reserved_too;
	uint32_t want_slots;
	uint32_t want_buffer_bytes;
	uint32_t kinds_count;
	uint32_t kinds[ARGUS_CUPTI_MAX_KINDS];
	uint32_t attributes_count;
	uint32_t runtime_calls_count;
	uint32_t driver_calls_count;
	struct argus_cupti_attribute attributes[8];
	uint32_t runtime_calls[ARGUS_CUPTI_MAX_CALLBACKS]; /* callback ids whose calls become API records */
	uint32_t driver_calls[ARGUS_CUPTI_MAX_CALLBACKS];
	struct argus_cupti_layout layouts[ARGUS_CUPTI_MAX_KINDS];
	char candidates[4096];     /* where CUPTI may be, one path a line, tried in order after what is already loaded */
};

struct argus_cupti_slot {
	uint32_t state;
	uint32_t stream;
	uint64_t sequence;      /* order of completion, from 1 */
	uint64_t valid;         /* bytes that hold records */
	uint64_t lost;          /* of them: behind an unknown record */
	uint32_t count;         /* records in the index, once READY */
	uint32_t flags;         /* 1: name pointers were replaced by name ids */
	uint64_t reserved[3];
};

/* The name table: entries of 8-byte aligned length, from ARGUS_CUPTI_NAMES_OFFSET up to names_used. Ids count from 1; 0: no
 * name. A pointer may occur again with another id: the memory was used for another name. */
struct argus_cupti_name {
	uint64_t pointer;
	uint32_t id;
	uint32_t length;  /* of the text that follows, without padding */
};

/* Exported by the library, used outside too. Writes the offset of each record into `index` (room for `room`), returns how
 * many; *lost: bytes behind an unknown record. A kind of 0 ends the walk without loss: nothing was written there. */
uint32_t argus_cupti_walk(const uint8_t *buffer, uint64_t valid, const struct argus_cupti_layout *layouts, uint32_t *index,
			  uint32_t room, uint64_t *lost);

/* FULL -> CLAIMED, for one side alone. Returns whether it is the caller's. */
uint32_t argus_cupti_claim(uint32_t *state);

#endif
