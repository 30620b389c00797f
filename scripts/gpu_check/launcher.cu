// A CUDA program without PyTorch: known numbers of launches, kernels of known length. Built by nvcc, with the runtime
// linked statically or not.
//
//   launch N        N empty kernels -> {"begin_ns", "end_ns", "launch_ns": time of a launch on the CPU}
//   spin N NS       N times a kernel that spins NS on the GPU's own timer, each synchronised, with events around
//                   -> {"spins": [[before launch, after launch, after synchronisation, event ns, GPU timer ns], …]}
//   window SETTLE LENGTH BATCH PAUSE
//                   empty kernels for LENGTH ms after SETTLE ms, so many at a time, each batch then synchronised and
//                   followed by PAUSE us of doing nothing; the launches alone are timed
//                   -> {"batches", "launches", "median_ns", "min_ns"}: of the batches' times of a launch
//   gpu LENGTH COUNT NS
//                   for LENGTH ms: COUNT kernels of NS each, queued while the GPU is held, so that it alone decides how
//                   long they take -> {"batches", "late", "median_ns", "min_ns"}: of the batches' times of a kernel
//   exit
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <unistd.h>
#include <vector>

__global__ void argus_empty() {}

__global__ void argus_spin(uint64_t length_ns, uint64_t *measured) {
	uint64_t begin, now;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
	do {
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
	} while (now - begin < length_ns);
	*measured = now - begin;
}

__global__ void argus_busy(long long cycles) {
	long long begin = clock64();
	while (clock64() - begin < cycles)
		;
}

// Holds the GPU until it is opened, or too late.
__global__ void argus_gate(volatile uint32_t *gate, uint64_t most_ns) {
	uint64_t begin, now;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
	while (!gate[0]) {
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
		if (now - begin > most_ns) {
			gate[1] = 1;
			break;
		}
	}
}

static void report(const char *more, std::vector<double> &batches) {
	std::sort(batches.begin(), batches.end());
	size_t n = batches.size();
	printf("{%s, \"batches\": %zu, \"median_ns\": %.1f, \"min_ns\": %.1f}\n", more, n, n ? batches[n / 2] : 0.0,
	       n ? batches[0] : 0.0);
}

static uint64_t now_ns() {
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return uint64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

#define CHECK(call)                                                                                          \
	do {                                                                                                 \
		cudaError_t result = call;                                                                   \
		if (result != cudaSuccess) {                                                                 \
			printf("{\"error\": \"%s: %s\"}\n", #call, cudaGetErrorString(result));              \
			fflush(stdout);                                                                      \
			return 1;                                                                            \
		}                                                                                            \
	} while (0)

int main() {
	uint64_t *measured;
	volatile uint32_t *gate;
	int khz;
	cudaEvent_t begin, end;
	CHECK(cudaHostAlloc(&measured, sizeof *measured, cudaHostAllocMapped));
	CHECK(cudaHostAlloc((void **)&gate, 2 * sizeof *gate, cudaHostAllocMapped));
	CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
	CHECK(cudaEventCreate(&begin));
	CHECK(cudaEventCreate(&end));
	for (int k = 0; k < 100; ++k)
		argus_empty<<<1, 32>>>();
	argus_spin<<<1, 1>>>(1000, measured);
	argus_busy<<<1, 1>>>(1000);
	gate[0] = 1;
	argus_gate<<<1, 1>>>(gate, 1000);
	CHECK(cudaDeviceSynchronize());
	printf("{\"ready\": true, \"pid\": %d}\n", getpid());
	fflush(stdout);
	char line[256], verb[16], text[128];
	std::vector<double> batches;
	while (fgets(line, sizeof line, stdin)) {
		long long count = 0, length = 0;
		sscanf(line, "%15s %lld %lld", verb, &count, &length);
		if (!strcmp(verb, "exit"))
			break;
		if (!strcmp(verb, "launch")) {
			uint64_t began = now_ns(), spent = 0;
			for (long long done = 0; done < count;) {
				uint64_t before = now_ns();
				for (long long k = 0; k < 400 && done < count; ++k, ++done)
					argus_empty<<<1, 32>>>();
				spent += now_ns() - before;
				CHECK(cudaDeviceSynchronize()); // the queue never fills
			}
			printf("{\"begin_ns\": %lu, \"end_ns\": %lu, \"launch_ns\": %.1f}\n", began, now_ns(),
			       double(spent) / count);
		} else if (!strcmp(verb, "spin")) {
			printf("{\"spins\": [");
			for (long long k = 0; k < count; ++k) {
				float ms;
				CHECK(cudaEventRecord(begin));
				uint64_t before = now_ns();
				argus_spin<<<1, 1>>>(length, measured);
				uint64_t launched = now_ns();
				CHECK(cudaEventRecord(end));
				CHECK(cudaDeviceSynchronize());
				uint64_t after = now_ns();
				CHECK(cudaEventElapsedTime(&ms, begin, end));
				printf("%s[%lu, %lu, %lu, %.0f, %lu]", k ? ", " : "", before, launched, after, ms * 1e6,
				       *measured);
			}
			printf("]}\n");
		} else if (!strcmp(verb, "window")) {
			long long settle = 0, window = 0, batch = 1, pause = 0, launched = 0;
			sscanf(line, "%*s %lld %lld %lld %lld", &settle, &window, &batch, &pause);
			uint64_t from = now_ns() + settle * 1000000, until = from + window * 1000000, before;
			batches.clear();
			while ((before = now_ns()) < until) {
				for (long long k = 0; k < batch; ++k)
					argus_empty<<<1, 32>>>();
				uint64_t after = now_ns();
				CHECK(cudaDeviceSynchronize());
				if (before >= from) {
					batches.push_back(double(after - before) / batch);
					launched += batch;
				}
				for (uint64_t next = now_ns() + pause * 1000; now_ns() < next;)
					;
			}
			snprintf(text, sizeof text, "\"launches\": %lld", launched);
			report(text, batches);
		} else if (!strcmp(verb, "gpu")) {
			long long window = 0, batch = 1, kernel_ns = 0, late = 0;
			sscanf(line, "%*s %lld %lld %lld", &window, &batch, &kernel_ns);
			long long cycles = kernel_ns * khz / 1000000;
			batches.clear();
			for (uint64_t until = now_ns() + window * 1000000; now_ns() < until;) {
				float ms;
				gate[0] = gate[1] = 0;
				argus_gate<<<1, 1>>>(gate, 20000000);
				CHECK(cudaEventRecord(begin));
				for (long long k = 0; k < batch; ++k)
					argus_busy<<<1, 1>>>(cycles);
				CHECK(cudaEventRecord(end));
				gate[0] = 1;
				CHECK(cudaDeviceSynchronize());
				CHECK(cudaEventElapsedTime(&ms, begin, end));
				if (gate[1])
					++late;
				else
					batches.push_back(ms * 1e6 / batch);
			}
			snprintf(text, sizeof text, "\"late\": %lld", late);
			report(text, batches);
		} else {
			printf("{\"error\": \"unknown command\"}\n");
		}
		fflush(stdout);
	}
	return 0;
}
