// Experts of a few tokens: weights stream once from device memory to tensor cores, every thread its own part of them.
//
// A block takes 16 rows per row warp of gate and as many of up (moe_gate_up), or 32 of down (moe_down), for one tile of at
// most TILE tokens of one expert; K_WARPS warps share the columns. Weights are the m side of mma.m16n8k16, tokens the n
// side. Which k a lane's registers hold is free as long as weights and activations agree: lane (g, t) copies the
// 16 bytes of row g that it will multiply into a ring of its own in shared memory (cp.async), so weights need no barrier, and
// activations are put down in the order in which lanes read them. Blocks of 128 columns are the steps of the ring: the
// groups of scales.
//
// Defines: EXPERT_KIND, EXPERT_UE8M0, EXPERT_DEPTH of the ring; SHARED_KIND (-1: no shared expert here), SHARED_UE8M0,
// SHARED_DEPTH; D, F, SHARED_F; TOP_K; TILE (8, 16, 32); ROW_WARPS, K_WARPS; CHUNK blocks of activations between barriers;
// DIRECT: every pair is a tile of its own, `tiles` and `order` are not there; PDL; BLOCKS_PER_SM.

#include <cstdint>
#include <type_traits>

constexpr int BF16 = 0, WINT8 = 1, WINT4 = 2, FP8 = 3;
constexpr int WARPS = ROW_WARPS * K_WARPS, THREADS = 32 * WARPS;
constexpr int PITCH = CHUNK * 256 + 64;  // bytes of a token's activations: 64 beyond whole banks, so that lanes do not collide
constexpr int UNITS = (K_WARPS * TILE * CHUNK * 16 + THREADS - 1) / THREADS;  // of 8 activations, staged by a thread

extern __shared__ uint4 shared[];

// 16-byte pieces of a row that a lane reads of 128 columns
template <int KIND> constexpr int PIECES = KIND == BF16 ? 4 : KIND == WINT4 ? 1 : 2;
constexpr int STAGED = 2 * K_WARPS * TILE * PITCH;
constexpr int STAGED_SCALES = 2 * K_WARPS * CHUNK * TILE * 4;

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

__device__ __forceinline__ void wait_for_predecessor() {
#if PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
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

// Eight activations as the products take them, and for fp8 the scale of their group, which 16 lanes share. WIDE: float32.
template <int KIND, bool POWERS, bool WIDE> __device__ __forceinline__ uint4 prepare(const uint4* x, float& scale) {
    if constexpr (KIND == WINT4) {
        return make_uint4(__byte_perm(x->x, x->z, 0x5410), __byte_perm(x->x, x->z, 0x7632),
                          __byte_perm(x->y, x->w, 0x5410), __byte_perm(x->y, x->w, 0x7632));
    } else if constexpr (KIND == FP8) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(x);
        float values[8], largest = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            values[i] = WIDE ? __uint_as_float(words[i]) : i % 2 ? high(words[i / 2]) : low(words[i / 2]);
            largest = fmaxf(largest, fabsf(values[i]));
        }
#pragma unroll
        for (int far = 8; far; far /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, far));
        scale = __fdiv_rn(fmaxf(largest, 1e-4f), 448.0f);
        if (POWERS) scale = __int_as_float((__float_as_int(scale) + 0x7FFFFF) & 0x7F800000);
        uint32_t halves[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float a = __fdiv_rn(values[2 * i], scale), b = __fdiv_rn(values[2 * i + 1], scale);
            uint16_t codes;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
            halves[i] = e4m3_to_half(codes, false);
        }
        return make_uint4(halves[0], halves[1], halves[2], halves[3]);
    }
    return *x;
}

struct Rows {  // of one weight matrix [rows, K] of one expert, from the block's first row on
    const char* data;
    const char* scales;
};

// sums[m][n/8] of the block's rows times its tokens, in the mma's layout; rows of the second matrix: `second`.
// ONE: a warp's rows are 32 of one matrix, `first`, and `second` is the same. Activations are float32 if WIDE, else bfloat16.
template <int KIND, bool POWERS, int DEPTH, int K, bool ONE, bool WIDE, int TOKENS>
__device__ __forceinline__ void product(float (&sums)[2][TOKENS / 8][4], Rows first, Rows second, int first_row,
                                        const char* x, const int* x_rows, int tokens, bool waited) {
    constexpr int BLOCKS = K / 128, COPIES = PIECES<KIND>, BYTES = 64 * COPIES, LONGEST = (BLOCKS + K_WARPS - 1) / K_WARPS;
    constexpr int STEP = ONE ? 32 : 16, MATRIX = ONE ? 16 : 16 * ROW_WARPS;  // rows from warp to warp, first to second
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row_warp = threadIdx.x / 32 % ROW_WARPS, k_warp = threadIdx.x / 32 / ROW_WARPS;
    const int begin = k_warp * BLOCKS / K_WARPS, count = (k_warp + 1) * BLOCKS / K_WARPS - begin;
    uint4* ring = shared + (threadIdx.x / 32) * (DEPTH * 4 * COPIES * 32) + lane;
    char* staged = reinterpret_cast<char*>(shared) + WARPS * DEPTH * 4 * COPIES * 32 * 16;
    float* staged_scales = reinterpret_cast<float*>(staged + STAGED);
    char* scales = staged + STAGED + (KIND == FP8 ? STAGED_SCALES : 0);

    const char* from[2];
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
        from[m] = (m ? second : first).data + (row_warp * STEP + (ONE ? 16 * m : 0) + g) * (K / 128 * BYTES) + begin * BYTES + 16 * t;
    }
    auto fetch = [&](int block, int slot) {
        #pragma unroll
        for (int m = 0; m < 2; ++m) {
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                #pragma unroll
                for (int i = 0; i < COPIES; ++i) {
                    copy16(ring + (slot * 4 * COPIES + (m * 2 + h) * COPIES + i) * 32,
                           from[m] + block * BYTES + h * 8 * (K / 128 * BYTES) + 64 * i);
                }
            }
        }
    };
    if constexpr (KIND == WINT4) {  // of all the block's rows; contiguous
        constexpr int PART = MATRIX * (ONE ? 2 * ROW_WARPS : 1) * BLOCKS * 2;
        for (int i = threadIdx.x * 16; i < PART; i += THREADS * 16) copy16(scales + i, first.scales + i);
        if (!ONE) {
            for (int i = threadIdx.x * 16; i < PART; i += THREADS * 16) copy16(scales + PART + i, second.scales + i);
        }
    }
    constexpr int BANDS = ONE ? (32 * ROW_WARPS + 127) / 128 : 1;  // blocks of 128 rows that the block's rows lie in
    if constexpr (KIND == FP8) {
        for (int i = threadIdx.x; i < BANDS * BLOCKS; i += THREADS) copy4(scales + 4 * i, first.scales + 4 * i);
        if (!ONE) {
            for (int i = threadIdx.x; i < BLOCKS; i += THREADS) copy4(scales + 4 * (BLOCKS + i), second.scales + 4 * i);
        }
    }
    for (int i = 0; i < DEPTH; ++i) {
        if (i < count) fetch(i, i);
        commit();
    }
    if (!waited) wait_for_predecessor();

    // What this thread stages of every chunk of activations.
    constexpr int PARTS = WIDE ? 2 : 1;  // of 16 bytes, of eight activations
    uint32_t source[UNITS];
    int last[UNITS];
    #pragma unroll
    for (int j = 0; j < UNITS; ++j) {
        int at = threadIdx.x + j * THREADS, token = at / (16 * CHUNK) % TILE, part = at / (16 * CHUNK * TILE);
        int block = part * BLOCKS / K_WARPS + at / 16 % CHUNK;
        bool real = part < K_WARPS && token < tokens;
        last[j] = real ? (part + 1) * BLOCKS / K_WARPS - block : 0;
        source[j] = ((real ? x_rows[token] : 0) * (K / 8) + block * 16 + at % 16) * PARTS;  // in units of 16 bytes
    }
    uint4 ahead[UNITS][PARTS];
    auto load = [&](int chunk) {
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
            const uint4* from = reinterpret_cast<const uint4*>(x) + (source[j] + chunk * (CHUNK * 16 * PARTS));
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                ahead[j][p] = chunk * CHUNK < last[j] ? from[p] : make_uint4(0, 0, 0, 0);
            }
        }
    };
    auto stage = [&](int buffer) {
        #pragma unroll
        for (int j = 0; j < UNITS; ++j) {
            int at = threadIdx.x + j * THREADS, part_token = at / (16 * CHUNK), block = at / 16 % CHUNK;
            float scale = 1;
            uint4 made = prepare<KIND, POWERS, WIDE>(ahead[j], scale);
            if (part_token >= K_WARPS * TILE) break;
            char* to = staged + (buffer * K_WARPS * TILE + part_token) * PITCH + block * 256;
            *reinterpret_cast<uint4*>(to + place<KIND>(at % 16) * 16) = made;
            if (KIND == FP8 && at % 16 == 0) {
                int part = part_token / TILE, token = part_token % TILE;
                staged_scales[((buffer * K_WARPS + part) * CHUNK + block) * TILE + token] = scale;
            }
        }
    };
    load(0);

    for (int i = 0, slot = 0; i < LONGEST; ++i) {
        wait_for_copies<DEPTH - 1>();
        const int buffer = i / CHUNK % 2;
        if (i % CHUNK == 0) {
            stage(buffer);
            if (i + CHUNK < LONGEST) load(i / CHUNK + 1);
            __syncthreads();  // also: every warp is done with the chunk before the last, whose place comes next
        }
        if (i < count) {
            uint4 weights[2][2][COPIES];
            #pragma unroll
            for (int m = 0; m < 2; ++m)
                #pragma unroll
                for (int h = 0; h < 2; ++h)
                    #pragma unroll
                    for (int p = 0; p < COPIES; ++p)
                        weights[m][h][p] = ring[(slot * 4 * COPIES + (m * 2 + h) * COPIES + p) * 32];
            const char* xs = staged + ((buffer * K_WARPS + k_warp) * TILE + g) * PITCH + i % CHUNK * 256 + t * 16;
            constexpr bool SCALED = KIND == WINT4 || KIND == FP8;
            float part[2][TOKENS / 8][4] = {};
            auto& into = *(SCALED ? &part : &sums);
            #pragma unroll
            for (int q = 0; q < 4; ++q) {
                uint4 tokens8[TOKENS / 8];
                #pragma unroll
                for (int n = 0; n < TOKENS / 8; ++n) {
                    tokens8[n] = *reinterpret_cast<const uint4*>(xs + n * 8 * PITCH + q * 64);
                }
                #pragma unroll
                for (int m = 0; m < 2; ++m) {
                    uint32_t upper[4], lower[4];
                    decode<KIND>(upper, reinterpret_cast<const uint32_t*>(weights[m][0]), q);
                    decode<KIND>(lower, reinterpret_cast<const uint32_t*>(weights[m][1]), q);
                    const uint32_t a[2][4] = {{upper[0], lower[0], upper[1], lower[1]}, {upper[2], lower[2], upper[3], lower[3]}};
                    #pragma unroll
                    for (int n = 0; n < TOKENS / 8; ++n) multiply<KIND>(into[m][n], a[0], tokens8[n].x, tokens8[n].y);
                    #pragma unroll
                    for (int n = 0; n < TOKENS / 8; ++n) multiply<KIND>(into[m][n], a[1], tokens8[n].z, tokens8[n].w);
                }
            }
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
                if constexpr (KIND == WINT4) {
                    const int row = m * MATRIX + row_warp * STEP + g;
                    const uint16_t* at = reinterpret_cast<const uint16_t*>(scales) + begin + i;
                    const float above = low(at[row * BLOCKS]), below = low(at[(row + 8) * BLOCKS]);
                    #pragma unroll
                    for (int n = 0; n < TOKENS / 8; ++n) {
                        #pragma unroll
                        for (int c = 0; c < 4; ++c) sums[m][n][c] += part[m][n][c] * (c < 2 ? above : below);
                    }
                } else if constexpr (KIND == FP8) {
                    const int band = ONE ? (first_row % 128 + row_warp * 32) / 128 : m;
                    const float of_weight = reinterpret_cast<const float*>(scales)[band * BLOCKS + begin + i];
                    const float* of_x = staged_scales + ((buffer * K_WARPS + k_warp) * CHUNK + i % CHUNK) * TILE + 2 * t;
                    #pragma unroll
                    for (int n = 0; n < TOKENS / 8; ++n) {
                        const float2 two = *reinterpret_cast<const float2*>(of_x + 8 * n);
                        #pragma unroll
                        for (int c = 0; c < 4; ++c) sums[m][n][c] += part[m][n][c] * (of_weight * (c % 2 ? two.y : two.x));
                    }
                }
            }
        }
        if (i + DEPTH < count) fetch(i + DEPTH, slot);
        commit();
        if (++slot == DEPTH) slot = 0;
    }
    wait_for_copies<0>();
}

// The sums of the warps that share rows, in their order, in the first of them.
template <int COUNT> __device__ __forceinline__ void add_up(float* sums) {
    if constexpr (K_WARPS == 1) return;
    const int warp = threadIdx.x / 32, row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS, lane = threadIdx.x % 32;
    float* parts = reinterpret_cast<float*>(shared) + lane;
    __syncthreads();
    for (int i = 0; i < COUNT; ++i) {
        if (k_warp) parts[((k_warp - 1) * ROW_WARPS + row_warp) * COUNT * 32 + i * 32] = sums[i];
    }
    __syncthreads();
    if (k_warp) return;
    for (int other = 1; other < K_WARPS; ++other) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] += parts[((other - 1) * ROW_WARPS + row_warp) * COUNT * 32 + i * 32];
    }
}

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

// What enters down: bfloat16, or float32 where it is quantized next, so that it is rounded once.
template <int KIND> using Hidden = std::conditional_t<KIND == FP8, float, uint16_t>;

// h[token, row] = silu(gate) * up for a tile; h begins at the tile's first token and the block's first row.
template <int KIND, bool POWERS, int DEPTH, int WIDTH, int TOKENS>
__device__ __forceinline__ void gate_up(Rows gate, Rows up, int row, const char* x, const int* x_rows, int tokens,
                                        Hidden<KIND>* h, bool waited) {
    float sums[2][TOKENS / 8][4] = {};
    product<KIND, POWERS, DEPTH, D, false, false, TOKENS>(sums, gate, up, row, x, x_rows, tokens, waited);
    add_up<TOKENS>(&sums[0][0][0]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp >= ROW_WARPS) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = warp * 16 + half * 8 + lane / 4;
        const float of_gate = row_scale<KIND>(gate, at), of_up = row_scale<KIND>(up, at);
#pragma unroll
        for (int i = 0; i < TOKENS / 4; ++i) {
            const int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
            const float a = sums[0][i / 2][2 * half + i % 2] * of_gate, b = sums[1][i / 2][2 * half + i % 2] * of_up;
            const float value = a / (1.0f + __expf(-a)) * b;
            if (token >= tokens) continue;
            if constexpr (KIND == FP8) {
                h[static_cast<size_t>(token) * WIDTH + at] = value;
            } else {
                h[static_cast<size_t>(token) * WIDTH + at] = bfloat16(value);
            }
        }
    }
}

// out[out_rows[token], row] = weight * (down h) for a tile; out begins at the block's first row. No weights: 1.
template <int KIND, bool POWERS, int DEPTH, int WIDTH, int TOKENS>
__device__ __forceinline__ void down(Rows rows, int row, const char* h, const int* h_rows, int tokens,
                                     const int* out_rows, int out_row, const float* weights, uint16_t* out, bool waited) {
    float sums[2][TOKENS / 8][4] = {};
    product<KIND, POWERS, DEPTH, WIDTH, true, KIND == FP8, TOKENS>(sums, rows, rows, row, h, h_rows, tokens, waited);
    add_up<TOKENS>(&sums[0][0][0]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp >= ROW_WARPS) return;
#pragma unroll
    for (int i = 0; i < TOKENS / 4; ++i) {
        const int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
        if (token >= tokens) continue;
        const int target = out_rows ? out_rows[token] : out_row + token;
        const float weight = weights ? weights[target] : 1.0f;
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int at = warp * 32 + part * 8 + lane / 4;
            const float sum = sums[part / 2][i / 2][part % 2 * 2 + i % 2];
            out[static_cast<size_t>(target) * D + at] = bfloat16(sum * row_scale<KIND>(rows, at) * weight);
        }
    }
}

struct Tile {
    int expert, first, tokens;
};

// Tile `index` of the routed pairs; expert -1 where there is none.
__device__ __forceinline__ Tile routed(const int* ids, const int4* tiles, int index) {
#if DIRECT
    return {ids[index], index, 1};
#else
    const int4 tile = tiles[index];
    return {tile.x, tile.y, tile.z};
#endif
}

// Calls `use` with the smallest number of tokens, a multiple of 8, that a tile fits in.
template <class Use> __device__ __forceinline__ void with_tokens(int tokens, Use use) {
    if constexpr (TILE > 16) {
        if (tokens > 16) return use(std::integral_constant<int, 32>());
    }
    if constexpr (TILE > 8) {
        if (tokens > 8) return use(std::integral_constant<int, 16>());
    }
    use(std::integral_constant<int, 8>());
}

// x       [T, D] bfloat16
// ids     [T, TOP_K]; tiles, order: what moe_plan made of them, for tiles of TILE
// h       [pairs in order, F]: what enters the experts' down; shared_h [T, SHARED_F] the shared expert's
// grid    the shared expert's tiles times its blocks of 16 ROW_WARPS rows, then all tiles times the experts'
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
moe_few_gate_up(const char* x, const int* ids, const int4* tiles, const int* order, const void* gate, const void* gate_scales,
                const void* up, const void* up_scales, Hidden<EXPERT_KIND>* h, const void* shared_gate, const void* shared_gate_scales,
                const void* shared_up, const void* shared_up_scales, Hidden<SHARED_KIND>* shared_h, int num_tokens) {
    __shared__ int x_rows[TILE];
    constexpr int ROWS = 16 * ROW_WARPS;
    int block = blockIdx.x;
#if SHARED_KIND >= 0
    const int shared_blocks = (num_tokens + TILE - 1) / TILE * (SHARED_F / ROWS);
    if (block < shared_blocks) {
        const int first = block / (SHARED_F / ROWS) * TILE, row = block % (SHARED_F / ROWS) * ROWS;
        if (threadIdx.x < TILE) x_rows[threadIdx.x] = first + threadIdx.x;
        __syncthreads();
        const int tokens = min(TILE, num_tokens - first);
        with_tokens(tokens, [&](auto most) {
            gate_up<SHARED_KIND, SHARED_UE8M0, SHARED_DEPTH, SHARED_F, most>(
                rows_of<SHARED_KIND, SHARED_F, D>(shared_gate, shared_gate_scales, 0, row),
                rows_of<SHARED_KIND, SHARED_F, D>(shared_up, shared_up_scales, 0, row), row, x, x_rows, tokens,
                shared_h + static_cast<size_t>(first) * SHARED_F + row, false);
        });
        return;
    }
    block -= shared_blocks;
#endif
    wait_for_predecessor();
    const Tile tile = routed(ids, tiles, block / (F / ROWS));
    if (tile.expert < 0) return;
    const int row = block % (F / ROWS) * ROWS;
    if (threadIdx.x < tile.tokens) {
        x_rows[threadIdx.x] = (DIRECT ? tile.first : order[tile.first + threadIdx.x]) / TOP_K;
    }
    __syncthreads();
    with_tokens(tile.tokens, [&](auto most) {
        gate_up<EXPERT_KIND, EXPERT_UE8M0, EXPERT_DEPTH, F, most>(rows_of<EXPERT_KIND, F, D>(gate, gate_scales, tile.expert, row),
                                      rows_of<EXPERT_KIND, F, D>(up, up_scales, tile.expert, row), row, x, x_rows, tile.tokens,
                                      h + static_cast<size_t>(tile.first) * F + row, true);
    });
}

// weights [T, TOP_K]
// out     [T * TOP_K + T, D] bfloat16: weighted rows of the pairs, then those of the shared expert
// grid    the shared expert's tiles times D's blocks of 32 ROW_WARPS rows, then all tiles times as many
// What is read before the wait was made before the predecessor, which waited for it before this could start.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
moe_few_down(const char* h, const int* ids, const int4* tiles, const int* order, const float* weights, const void* down_rows,
             const void* down_scales, uint16_t* out, const char* shared_h, const void* shared_down,
             const void* shared_down_scales, int num_tokens) {
    __shared__ int h_rows[TILE];
    constexpr int ROWS = 32 * ROW_WARPS;
    int block = blockIdx.x;
#if SHARED_KIND >= 0
    const int shared_blocks = (num_tokens + TILE - 1) / TILE * (D / ROWS);
    if (block < shared_blocks) {
        const int first = block / (D / ROWS) * TILE, row = block % (D / ROWS) * ROWS;
        if (threadIdx.x < TILE) h_rows[threadIdx.x] = first + threadIdx.x;
        __syncthreads();
        const int tokens = min(TILE, num_tokens - first);
        with_tokens(tokens, [&](auto most) {
            down<SHARED_KIND, SHARED_UE8M0, SHARED_DEPTH, SHARED_F, most>(
                rows_of<SHARED_KIND, D, SHARED_F>(shared_down, shared_down_scales, 0, row), row, shared_h, h_rows, tokens,
                nullptr, num_tokens * TOP_K + first, nullptr, out + row, false);
        });
        return;
    }
    block -= shared_blocks;
#endif
    const Tile tile = routed(ids, tiles, block / (D / ROWS));
    if (tile.expert < 0) return wait_for_predecessor();
    const int row = block % (D / ROWS) * ROWS;
    if (threadIdx.x < TILE) h_rows[threadIdx.x] = tile.first + threadIdx.x;
    __syncthreads();
    with_tokens(tile.tokens, [&](auto most) {
        down<EXPERT_KIND, EXPERT_UE8M0, EXPERT_DEPTH, F, most>(rows_of<EXPERT_KIND, D, F>(down_rows, down_scales, tile.expert, row), row, h, h_rows,
                                   tile.tokens, DIRECT ? nullptr : order + tile.first, tile.first, weights, out + row, false);
    });
}
