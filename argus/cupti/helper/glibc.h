/* Included before everything else. glibc 2.34 moved these functions into libc.so.6 and gave them a new version; a library
 * that asks for that one cannot be loaded on older systems (RHEL 8, Ubuntu 20.04), where CUDA still runs. The version of
 * before is everywhere. tests/e2e/test_packaging.py finds symbols that are missing here and would need more than 2.28. */
#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#ifdef __x86_64__
#define ARGUS_GLIBC_SINCE(name, version) __asm__(".symver " #name "," #name "@GLIBC_" version);
#else /* this port begins with 2.17 */
#define ARGUS_GLIBC_SINCE(name, version) __asm__(".symver " #name "," #name "@GLIBC_2.17");
#endif
ARGUS_GLIBC_SINCE(dladdr, "2.2.5")
ARGUS_GLIBC_SINCE(dladdr1, "2.3.3")
ARGUS_GLIBC_SINCE(dlclose, "2.2.5")
ARGUS_GLIBC_SINCE(dlerror, "2.2.5")
ARGUS_GLIBC_SINCE(dlinfo, "2.3.3")
ARGUS_GLIBC_SINCE(dlmopen, "2.3.4")
ARGUS_GLIBC_SINCE(dlopen, "2.2.5")
ARGUS_GLIBC_SINCE(dlsym, "2.2.5")
ARGUS_GLIBC_SINCE(dlvsym, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_attr_setstacksize, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_create, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_detach, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_getspecific, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_join, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_key_create, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_key_delete, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_kill, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_mutex_timedlock, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_mutex_trylock, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_once, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_setname_np, "2.12")
ARGUS_GLIBC_SINCE(pthread_setspecific, "2.2.5")
ARGUS_GLIBC_SINCE(pthread_sigmask, "2.2.5")
ARGUS_GLIBC_SINCE(sem_init, "2.2.5")
ARGUS_GLIBC_SINCE(sem_post, "2.2.5")
ARGUS_GLIBC_SINCE(sem_timedwait, "2.2.5")
ARGUS_GLIBC_SINCE(sem_wait, "2.2.5")
#endif
