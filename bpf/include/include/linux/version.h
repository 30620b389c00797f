/* bcc passes LINUX_VERSION_CODE_OVERRIDE where it matters; uprobe and perf programs are not tied to a version. */
#ifndef LINUX_VERSION_CODE
#define LINUX_VERSION_CODE 0
#endif
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))
