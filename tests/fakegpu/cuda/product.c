/* The two kernels that are computed (FAKEGPU_COMPUTE): argus_gemm_f16 and argus_gemm_f32, products of small integers of
 * which argus/health/checks/_gemm.py has the PTX. Written from what PTX ISA says of the fragments of mma.m16n8k16. PTX
 * itself is not interpreted: that it does the same, a real GPU has to show (scripts/gpu-check --only health). */
#include <stdint.h>
#include <string.h>

#include "engine.h"
#include "settings.h"

#define SMS_TOLD 512
#define SMS 132
#define WARPS 8
#define LANES 32
#define WRONG_SM 17

static float half(uint16_t bits) { /* normal numbers and 0 */
    uint32_t exponent = bits >> 10 & 31;
    uint32_t single = (uint32_t)(bits >> 15) << 31 | (exponent ? exponent + 112 : 0) << 23 | (uint32_t)(bits & 1023) << 13;
    float value;
    memcpy(&value, &single, sizeof value);
    return value;
}

/* Element (row, column) of a 16x16 A in four words a thread, of a 16x8 B in two. */
static float of_a(const uint32_t (*words)[LANES], int row, int column) {
    uint32_t word = words[(row >= 8) + 2 * (column >= 8)][row % 8 * 4 + column % 8 / 2];
    return half((uint16_t)(column % 2 ? word >> 16 : word));
}

static float of_b(const uint32_t (*words)[LANES], int row, int column) {
    uint32_t word = words[row >= 8][column * 4 + row % 8 / 2];
    return half((uint16_t)(row % 2 ? word >> 16 : word));
}

static int tensor_cores(const uint32_t (*in)[LANES], float (*out)[LANES]) {
    for (int chain = 0; chain < 8; chain++)
        for (int row = 0; row < 16; row++)
            for (int column = 0; column < 8; column++) {
                float sum = 0;
                for (int k = 0; k < 16; k++)
                    for (int a = 0; a < 2; a++)
                        sum += of_a(in + 4 * a, row, k) * of_b(in + 8 + 2 * chain, k, column);
                out[4 * chain + 2 * (row >= 8) + column % 2][row % 8 * 4 + column / 2] = sum;
            }
    return 32;
}

static int plain(const uint32_t (*in)[LANES], float (*out)[LANES]) {
    const float(*numbers)[LANES] = (const float(*)[LANES])in;
    for (int k = 0; k < 16; k++)
        for (int lane = 0; lane < LANES; lane++)
            out[k][lane] = (numbers[k / 4][lane] + numbers[4 + k / 4][lane]) * numbers[8 + k % 4][lane];
    return 16;
}

void product_run(const char *name, unsigned blocks, void **params, int device) {
    bool on_tensor_cores = !strcmp(name, "argus_gemm_f16");
    if (!settings.compute || !params || (!on_tensor_cores && strcmp(name, "argus_gemm_f32"))) return;
    static float one[32][LANES]; /* the engine's lock is held */
    const uint32_t(*in)[LANES] = memory_content(*(uint64_t *)params[2], 12 * LANES * sizeof(uint32_t));
    if (!in) return;
    int words = on_tensor_cores ? tensor_cores(in, one) : plain(in, one);
    uint32_t rounds = *(uint32_t *)params[3];
    uint32_t *sums = memory_content(*(uint64_t *)params[0], (uint64_t)SMS_TOLD * WARPS * (uint64_t)words * LANES * 4);
    uint32_t *ran = memory_content(*(uint64_t *)params[1], SMS_TOLD * sizeof(uint32_t));
    if (!sums || !ran) return;
    for (unsigned sm = 0; sm < SMS; sm++) {
        uint32_t here = blocks / SMS + (sm < blocks % SMS);
        ran[sm] += here;
        for (int warp = 0; warp < WARPS; warp++)
            for (int word = 0; word < words; word++)
                for (int lane = 0; lane < LANES; lane++)
                    sums[((sm * WARPS + (unsigned)warp) * (unsigned)words + (unsigned)word) * LANES + (unsigned)lane] +=
                        here * (uint32_t)((int32_t)one[word][lane] * (int32_t)rounds);
    }
    if (device == settings.wrong_device) sums[(WRONG_SM * WARPS + 3) * (unsigned)words * LANES + 5]++;
}
