/* A program whose mappings and pointers lie: cupti_target helper FILE maps a memory as CUPTI's helper does, and FILE's page;
 * writes where that page lies. With a line on its standard input it puts FILE over the helper's memory. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define HEAD 65536

int main(int count, char **words)
{
	int fd = memfd_create("argus-cupti", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int file = count == 2 ? open(words[1], O_RDONLY) : -1;
	char line[16], *head, *page;

	if (fd < 0 || file < 0 || ftruncate(fd, HEAD) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0)
		return 1;
	head = mmap(NULL, HEAD, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, file, 0);
	if (head == MAP_FAILED || page == MAP_FAILED)
		return 2;
	printf("%lx\n", (unsigned long)page);
	fflush(stdout);
	if (fgets(line, sizeof(line), stdin) != NULL &&
	    mmap(head, HEAD, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) != MAP_FAILED) {
		puts("exchanged");
		fflush(stdout);
	}
	for (;;)
		pause();
}
