/* The helper, for a process that runs already: loading it starts it, as CUDA would have done at cuInit. One library in one
 * file, since it is loaded from memory (argus/cupti/inject.py). Whoever injects waits for its constructor: nothing here may
 * wait for the process. */
#include "helper.c"

#include <link.h>

/* What /proc/PID/maps calls the file: no name of a file. */
#define SHOWN_AS "/memfd:argus-inject (deleted)"

/* It was loaded as /proc/self/…/fd/N, and N will be another file's number: who opens what the loader lists, to read its
 * symbols, must not find that one. */
static void rename_it(void) {
	Dl_info self;
	void *found = NULL;
	if (!dladdr1((void *)rename_it, &self, &found, RTLD_DL_LINKMAP) || !found)
		return;
	struct link_map *map = found;
	if (map->l_name && strlen(map->l_name) >= sizeof SHOWN_AS - 1)
		memcpy(map->l_name, SHOWN_AS, sizeof SHOWN_AS);
}

__attribute__((constructor)) static void start_helper(void) {
	rename_it();
	InitializeInjection();
}
