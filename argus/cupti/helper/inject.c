/* Put into a running process (argus/cupti/inject.py), it starts the helper that lies beside it, as CUDA would have done at
 * cuInit. Whoever injects waits for its constructor: nothing here may wait for the process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

#define HELPER "libargus_cupti.so"

__attribute__((constructor)) static void start_helper(void)
{
	char path[4096];
	Dl_info self;
	const char *slash;

	if (!dladdr((void *)start_helper, &self) || !self.dli_fname || !(slash = strrchr(self.dli_fname, '/')))
		return;
	size_t folder = (size_t)(slash - self.dli_fname) + 1;
	if (folder + sizeof(HELPER) > sizeof(path))
		return;
	memcpy(path, self.dli_fname, folder);
	memcpy(path + folder, HELPER, sizeof(HELPER));

	void *helper = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	int (*start)(void);

	if (!helper)
		return;
	*(void **)&start = dlsym(helper, "InitializeInjection");
	if (start)
		start();
}
