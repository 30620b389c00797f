/* NVTX's functions as libnvToolsExt exports them, with no tool in the process: they do nothing. */
#include <stddef.h>
#include <stdint.h>

#define NO_TOOL (-2) /* NVTX_NO_PUSH_POP_TRACKING */

int nvtxRangePushA(const char *name) { (void)name; return NO_TOOL; }
int nvtxRangePushW(const wchar_t *name) { (void)name; return NO_TOOL; }
int nvtxRangePushEx(const void *attributes) { (void)attributes; return NO_TOOL; }
int nvtxRangePop(void) { return NO_TOOL; }
uint64_t nvtxRangeStartA(const char *name) { (void)name; return 0; }
void nvtxRangeEnd(uint64_t id) { (void)id; }
int nvtxDomainRangePushEx(void *domain, const void *attributes) { (void)domain, (void)attributes; return NO_TOOL; }
int nvtxDomainRangePop(void *domain) { (void)domain; return NO_TOOL; }
void nvtxMarkA(const char *name) { (void)name; }
