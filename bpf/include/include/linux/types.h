#ifndef ARGUS_STUB_TYPES_H
#define ARGUS_STUB_TYPES_H
typedef signed char __s8, s8;
typedef unsigned char __u8, u8;
typedef signed short __s16, s16;
typedef unsigned short __u16, u16;
typedef signed int __s32, s32;
typedef unsigned int __u32, u32;
typedef signed long long __s64, s64;
typedef unsigned long long __u64, u64;
typedef __u16 __be16, __le16, __sum16;
typedef __u32 __be32, __le32, __wsum;
typedef __u64 __be64, __le64;
#define __aligned_u64 __u64 __attribute__((aligned(8)))
#define __aligned_be64 __be64 __attribute__((aligned(8)))
typedef unsigned long size_t, uintptr_t;
typedef long ssize_t;
typedef int pid_t;
typedef _Bool bool;
#define true 1
#define false 0
#define NULL ((void *)0)
#endif
