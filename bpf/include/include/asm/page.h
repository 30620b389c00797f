/* bcc sizes ring buffers in pages. 4096 is a unit here, not the machine's page: rings are at least 64 KiB, a multiple of
 * every page size in use. */
#ifndef PAGE_SIZE
#define PAGE_SIZE 4096
#endif
