/* The log of what really ran. All locked, but for ops_log_add, which only the thread that delivers calls. */
#ifndef FAKEGPU_OPS_LOG_H
#define FAKEGPU_OPS_LOG_H

#include "engine.h"

bool ops_log_on(void);
void ops_log_open(void);
/* The next name: names count from 1. */
void ops_log_name(const char *name);
void ops_log_add(const struct fakegpu_record *op, uint32_t name);

#endif
