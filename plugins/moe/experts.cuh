// What few_tokens.cu and one_token.cu share: copies, decoding, and the places of activations that go with it.
//
// Weights are the m side of mma.m16n8k16, tokens the n side. Which k a lane's registers hold is free as long as weights and
// activations agree: lane (g, t) copies the 16 bytes of row g that it will multiply into a ring of its own in shared memory
// (cp.async), so weights need no barrier, and activations are put down in the order in which lanes read them. Blocks of 128
// columns, the groups of scales, are the steps of the ring.
#pragma once

#include <cstdint>
#include <type_traits>

constexpr int BF16 = 0, WINT8 = 1, WINT4 = 2, FP8 = 3;

// 16-byte pieces of a row that a lane reads of 128 columns
template <int KIND> constexpr int PIECES = KIND == BF16 ? 4 : KIND == WINT4 ? 1 : 2;
__device__ __forceinline__ void copy16(void* to, const void* from) {
    uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

__device__ __forceinline__ void copy4(void* to, const void* from) {
    uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ uint16_t bfloat16(float value) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ uint32_t e4m3_to_half(uint32_t codes, bool upper) {
    uint32_t pair;
    uint16_t two = static_cast<uint16_t>(upper ? codes >> 16 : codes);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(two));
    return pair;
}

template <int KIND> __device__ __forceinline__ void multiply(float* sums, const uint32_t* a, uint32_t b0, uint32_t b1) {
    if constexpr (KIND == FP8) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Eight weights of a row, the q-th of a lane's four portions of 128 columns: two pairs for each of two products.
template <int KIND> __device__ __forceinline__ void decode(uint32_t* pairs, const uint32_t* words, int q) {
    if constexpr (KIND == WINT4) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {  // nibble n: the bits 0x4300 | (n ^ 8) are 128 + n + 8
            uint32_t bits;
            asm("lop3.b32 %0, %1, 0x000F000F, 0x43084308, 0x6A;" : "=r"(bits) : "r"(words[q] >> (4 * i)));
            pairs[i] = fma_bf16x2(bits, 0x3F803F80u, 0xC308C308u);
        }
    } else if constexpr (KIND == WINT8) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {  // int8 b: 128 + (b & 127), less 128 or, if b is negative, 256
            uint32_t bytes = __byte_perm(words[2 * q + i / 2], 0, i % 2 ? 0x4342 : 0x4140), size, less;
            asm("lop3.b32 %0, %1, 0x007F007F, 0x43004300, 0xEA;" : "=r"(size) : "r"(bytes));
            asm("lop3.b32 %0, %1, 0x00800080, 0x43004300, 0xEA;" : "=r"(less) : "r"(bytes));
            pairs[i] = fma_bf16x2(less, 0xBF80BF80u, size);
        }
    } else if constexpr (KIND == FP8) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = e4m3_to_half(words[2 * q + i / 2], i % 2);
    } else {
        #pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = words[4 * q + i];
    }
}

// Which of the 16 places of 128 activations natural unit `unit` of eight takes: lane t reads places 4 q + t, q = 0..3.
template <int KIND> __device__ __forceinline__ int place(int unit) {
    if constexpr (KIND == WINT4) return unit % 4 * 4 + unit / 4;
    if constexpr (KIND == WINT8 || KIND == FP8) return (unit / 8 * 2 + unit % 2) * 4 + unit % 8 / 2;
    return unit;
}

__device__ __forceinline__ uint16_t e4m3_pair(float a, float b) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
    return codes;
}

template <bool POWERS> __device__ __forceinline__ float scale_of(float largest) {
    const float scale = __fdiv_rn(fmaxf(largest, 1e-4f), 448.0f);
    return POWERS ? __int_as_float((__float_as_int(scale) + 0x7FFFFF) & 0x7F800000) : scale;
}

// Eight bfloat16 in the order in which nibbles are decoded.
__device__ __forceinline__ uint4 as_nibbles(uint4 x) {
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                      __byte_perm(x.y, x.w, 0x7632));
}

// Eight activations as e4m3, widened to halves, and the scale of their group of 128, which half a warp shares.
template <bool POWERS> __device__ __forceinline__ uint4 quantize(const float (&values)[8], float& scale) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(values[i]));
    const unsigned sharing = 0xFFFFu << (threadIdx.x & 16);
#pragma unroll
    for (int far = 8; far; far /= 2) largest = fmaxf(largest, __shfl_xor_sync(sharing, largest, far));
    scale = scale_of<POWERS>(largest);
    uint32_t halves[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        halves[i] = e4m3_to_half(e4m3_pair(__fdiv_rn(values[2 * i], scale), __fdiv_rn(values[2 * i + 1], scale)), false);
    }
    return make_uint4(halves[0], halves[1], halves[2], halves[3]);
}

struct Rows {  // of one weight matrix [rows, K] of one expert, from the block's first row on
    const char* data;
    const char* scales;
};

template <int KIND, int ROWS, int K> __device__ __forceinline__ Rows rows_of(const void* data, const void* scales, int expert, int row) {
    const size_t at = static_cast<size_t>(expert) * ROWS + row;
    const size_t scale = KIND == FP8     ? (static_cast<size_t>(expert) * ((ROWS + 127) / 128) + row / 128) * (K / 128) * 4
                         : KIND == WINT4 ? at * (K / 128) * 2
                                         : at * 2;
    return {static_cast<const char*>(data) + at * (K / 128 * 64 * PIECES<KIND>), static_cast<const char*>(scales) + scale};
}

// The scale of a whole row where the format has such, else 1.
template <int KIND> __device__ __forceinline__ float row_scale(Rows rows, int row) {
    if constexpr (KIND == WINT8) return low(reinterpret_cast<const uint16_t*>(rows.scales)[row]);
    return 1.0f;
}
