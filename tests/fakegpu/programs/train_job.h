/* What the ranks of fake_train and fake_plan share besides NCCL: one small file, mapped by all. It carries the unique
 * id, and the step after which all stop when one of them is asked to; a rank that stopped alone would leave the others
 * waiting. */
#ifndef TRAIN_JOB_H
#define TRAIN_JOB_H

#include "nccl_abi.h"
#include "train_options.h"

/* Rank 0 makes the file, and the id where one is wanted (not NULL); the others wait for it. */
void job_start(const struct options *options, ncclUniqueId *id);
/* Takes SIGTERM as the wish to stop. */
void job_catch_signals(double grace_s);
bool job_told_to_stop(void);
/* Whether the job ends before this step. Each rank asks once before each step. */
bool job_over(long step);

/* Waits, in small sleeps, until the file exists or the job is asked to stop. */
void wait_for_file(const char *path);
/* Idle processes with the CUDA libraries mapped, as data loaders that were forked; ended with their parent. */
void workers_start(int count);
void workers_end(void);

#endif
