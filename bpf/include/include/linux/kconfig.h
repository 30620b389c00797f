/* Stub kernel headers: just enough for bcc to compile uprobe, perf-event and raw-tracepoint programs on a machine that
 * has no kernel headers. Facts of the stable user-space ABI only; nothing here depends on the running kernel. */
#define CONFIG_BPF_SYSCALL 1
