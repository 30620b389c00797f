/* A libnvidia-ml.so.1 that says what a file says: lines such as "gpu1.Temperature 93", "gpu0.NvLinkState.3 0", "Init hang".
 * Value "error N" makes the call return N, "hang" never returns. What has no line is healthy: an H100 at work. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

static int failed;

static long long configured(const char *key, long long otherwise)
{
	char line[256], name[128], word[64];
	long long number = otherwise;
	FILE *file = fopen(getenv("FAKE_NVML"), "r");

	failed = SUCCESS;
	while (file && fgets(line, sizeof line, file)) {
		int more = 0;
		if (sscanf(line, "%127s %63s %d", name, word, &more) < 2 || strcmp(name, key))
			continue;
		if (!strcmp(word, "hang"))
			for (;;)
				pause();
		if (!strcmp(word, "error"))
			failed = more;
		else
			number = atoll(word);
	}
	if (file)
		fclose(file);
	return number;
}

static long long of(void *device, const char *what, long long otherwise)
{
	char key[128];
	snprintf(key, sizeof key, "gpu%d.%s", (int)(long)device - 1, what);
	return configured(key, otherwise);
}

#define SYSTEM(name) int nvmlSystemGet##name(char *out, unsigned size) { snprintf(out, size, "%lld.1", configured(#name, 570)); return failed; }
#define UINT(name, healthy) int nvmlDeviceGet##name(void *d, unsigned *out) { *out = of(d, #name, healthy); return failed; }
#define UINT2(name, healthy) int nvmlDeviceGet##name(void *d, unsigned kind, unsigned *out) { (void)kind; *out = of(d, #name, healthy); return failed; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; configured("Init", 0); return failed; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "some error"; }
SYSTEM(DriverVersion)
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 12080; return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = configured("Count", 2); return failed; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { *out = (void *)(long)(index + 1); of(*out, "Handle", 0); return failed; }
int nvmlDeviceGetName(void *d, char *out, unsigned size) { snprintf(out, size, "NVIDIA H%lld", of(d, "Name", 100)); return failed; }
UINT(PersistenceMode, 1)
UINT(CurrPcieLinkWidth, 16)
UINT(MaxPcieLinkWidth, 16)
UINT(CurrPcieLinkGeneration, 5)
UINT(MaxPcieLinkGeneration, 5)
UINT(PcieReplayCounter, 0)
UINT(PowerUsage, 650000)
UINT(PowerManagementDefaultLimit, 700000)
UINT(EnforcedPowerLimit, 700000)
UINT2(ClockInfo, 1800)
UINT2(MaxClockInfo, 1980)
UINT2(ApplicationsClock, 1980)
UINT2(Temperature, 60)
UINT2(TemperatureThreshold, 87)
int nvmlDeviceGetUtilizationRates(void *d, unsigned *out) { out[0] = out[1] = of(d, "Utilization", 98); return failed; }
int nvmlDeviceGetCurrentClocksEventReasons(void *d, unsigned long long *out) { *out = of(d, "Reasons", 4); return failed; }
int nvmlDeviceGetViolationStatus(void *d, int policy, unsigned long long *out) { (void)policy; out[0] = 1; out[1] = of(d, "Violation", 0); return failed; }
int nvmlDeviceGetEccMode(void *d, unsigned *now, unsigned *next) { *now = *next = of(d, "EccMode", 1); return failed; }
int nvmlDeviceGetTotalEccErrors(void *d, int kind, int counter, unsigned long long *out)
{
	char key[64];
	snprintf(key, sizeof key, "Ecc.%s.%s", kind ? "uncorrected" : "corrected", counter ? "life" : "volatile");
	*out = of(d, key, 0);
	return failed;
}
int nvmlDeviceGetRemappedRows(void *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure)
{
	*corrected = 0;
	*pending = of(d, "RemapPending", 0);
	*failure = of(d, "RemapFailure", 0);
	*uncorrected = of(d, "Remapped", 0);
	return failed;
}
int nvmlDeviceGetRowRemapperHistogram(void *d, unsigned *out) { memset(out, 0, 20); out[4] = of(d, "NoSpare", 0); return failed; }
int nvmlDeviceGetRetiredPagesPendingStatus(void *d, unsigned *out) { *out = of(d, "RetiredPending", 0); return failed; }
int nvmlDeviceGetNvLinkState(void *d, unsigned link, unsigned *out)
{
	char key[64];
	if (link >= 18)
		return NOT_SUPPORTED;
	snprintf(key, sizeof key, "NvLinkState.%u", link);
	*out = of(d, key, 1);
	return failed;
}
int nvmlDeviceGetNvLinkErrorCounter(void *d, unsigned link, int kind, unsigned long long *out)
{
	char key[64];
	snprintf(key, sizeof key, "NvLinkError.%u.%d", link, kind);
	*out = of(d, key, 0);
	return failed;
}

/* nvmlFieldValue_t; of all fields only the temperature of memory is known (NVML_FI_DEV_MEMORY_TEMP, 82). */
struct field { unsigned id, scope; long long at, latency; int type, code; union { unsigned number; long long all; } value; };
int nvmlDeviceGetFieldValues(void *d, int count, struct field *fields)
{
	for (int k = 0; k < count; k++) {
		fields[k].value.all = of(d, "MemoryTemperature", 70);
		fields[k].code = fields[k].id == 82 ? failed : NOT_SUPPORTED;
	}
	return SUCCESS;
}

/* As the real one: NVML_ERROR_INSUFFICIENT_SIZE and how many there are, where there is no room for them. */
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *count, void *infos) {
  unsigned room = *count;
  (void)infos;
  *count = of(d, "ComputeRunningProcesses", 0);
  return failed ? failed : *count > room ? 7 : 0;
}
