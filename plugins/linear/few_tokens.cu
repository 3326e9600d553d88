// y = x W^T for a few tokens and 4-bit codes: every multiprocessor streams an equal share of W to its tensor cores.
//
// W is cut into tiles of ROWS rows, a tile into steps of 128 columns; block b takes the b-th share of all steps, tile by tile.
// A tile that blocks share is added up by the last of them to arrive, in the order of the blocks: the same sums in every run.
//
// Codes are multiplied as int8, so that decoding costs next to nothing: nibbles stay in the upper half of a byte (16 times
// their value). Activations become integers of 15 bits per token and 128 columns, scaled by a power of two: a value loses
// nothing unless it is below 1/64 of the largest, and then less than 2^-15 of that, where bfloat16 results keep 2^-9.
// Their upper and lower bytes are two columns of mma.m16n8k32, of which weights are the m side; sums are exact.
//
// Which k a lane's registers hold is free as long as weights and activations agree: lane (g, t) copies 16 bytes of row g
// into a ring of its warp in shared memory (cp.async), so weights need no barrier. Activations are put down in the order in
// which lanes read them, CHUNK steps between barriers.
//
// Defines: GROUP; N, K (a multiple of 128); TOKENS (4, 8, 16, 32) at most; WARPS, and TILES of
// 16 rows a warp; DEPTH of the ring in steps; CHUNK; BLOCKS_PER_SM; GATHER; WIDE: y is float32; PDL; SHARED_BYTES.

#include <cstdint>

constexpr int THREADS = 32 * WARPS, ROWS = 16 * TILES * WARPS, STEPS = K / 128, NUM_TILES = (N + ROWS - 1) / ROWS;
constexpr int QUADS = TOKENS / 4;  // n sides: four tokens, their upper and lower bytes
constexpr int STEP_BYTES = 64;  // of a row; a lane copies 16 of them
constexpr int64_t ROW_BYTES = STEPS * STEP_BYTES;
constexpr int PARTS = 128 / GROUP;  // scales of a row and step
constexpr int SCALE_BYTES = PARTS == 4 ? 8 : 4;  // of a row and step in the ring
constexpr int CODES = 2 * TILES * 32 * 16, SLOT = CODES + 16 * TILES * SCALE_BYTES;  // bytes of a warp's step
constexpr int PITCH = CHUNK * 128 + 64;  // bytes of a column: 64 beyond whole banks, so that lanes do not collide
constexpr int UNITS = (TOKENS * CHUNK * 16 + THREADS - 1) / THREADS;  // of 8 activations, staged by a thread
constexpr int STAGED = 2 * TOKENS * PITCH + CHUNK * TOKENS * 4;  // bytes of a buffer of activations and their scales
static_assert(WARPS * DEPTH * SLOT + 2 * STAGED == SHARED_BYTES, "the launch asks for this much");

extern __shared__ uint4 shared[];

template <int BYTES> __device__ __forceinline__ void copy(uint32_t to, const void* from) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
    }
}

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ void multiply(int* sums, const uint32_t* a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Unit `unit` of eight activations of 128 is what lane `t` reads for the `word`-th product, and lies in a column here:
__device__ __forceinline__ int place(int unit) {
    int t, word;
    if constexpr (PARTS == 1) t = unit / 4, word = unit % 4;
    else t = unit % 4, word = unit / 4;
    return (word / 2 * 4 + t) * 16 + word % 2 * 8;
}

// Eight activations as integers: upper bytes of k 0 2 4 6 and 1 3 5 7, then lower bytes.
__device__ __forceinline__ uint4 prepare(uint4 x, float& scale) {
    const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fmaxf(fabsf(low(pairs[i])), fabsf(high(pairs[i]))));
#pragma unroll
    for (int far = 8; far; far /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, far));
    const uint32_t exponent = max(__float_as_uint(largest) >> 23, 14u);  // and NaN stays NaN through the scale
    scale = __uint_as_float(exponent == 255 ? 0x7FC00000u : (exponent - 13) << 23);
    const float up = __uint_as_float((267 - exponent) << 23);
    uint32_t codes[8];  // 1.5 * 2^23 + x * up: the lower half is the integer, and with 128 added its upper byte
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        codes[2 * i] = __float_as_uint(fmaf(low(pairs[i]), up, 12582912.0f));
        codes[2 * i + 1] = __float_as_uint(fmaf(high(pairs[i]), up, 12582912.0f));
    }
    auto gather = [&](int a, int b, int c, int d, int byte) {
        const uint32_t select = byte ? 0x0051 : 0x0040;
        return __byte_perm(__byte_perm(codes[a], codes[b], select), __byte_perm(codes[c], codes[d], select), 0x5410);
    };
    const uint32_t lower0 = gather(0, 2, 4, 6, 0);
    const uint32_t lower1 = gather(1, 3, 5, 7, 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] += 128;
    const uint32_t upper0 = gather(0, 2, 4, 6, 1);
    const uint32_t upper1 = gather(1, 3, 5, 7, 1);
    return make_uint4(upper0, upper1, lower0, lower1);
}

__device__ __forceinline__ void put(void* y, int64_t at, float value) {
#if WIDE
    static_cast<float*>(y)[at] = value;
#else
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    static_cast<uint16_t*>(y)[at] = bits;
#endif
}

struct Share {  // of a block: steps [begin, end)
    int size, begin, end;
    __device__ Share() {
        size = (NUM_TILES * STEPS + gridDim.x - 1) / gridDim.x;
        begin = min(static_cast<int>(blockIdx.x) * size, NUM_TILES * STEPS);
        end = min(begin + size, NUM_TILES * STEPS);
    }
    // Where a block's part of a tile lies: its first tile's and its last one's are apart.
    __device__ int64_t part(int block, int tile) const {
        return static_cast<int64_t>(2 * block + (block * size / STEPS != tile)) * (ROWS * TOKENS);
    }
    __device__ int first(int tile) const { return tile * STEPS / size; }  // of the blocks that share a tile
    __device__ int last(int tile) const { return ((tile + 1) * STEPS - 1) / size; }
};

// Put the parts of a tile together, all of which are there.
__device__ __forceinline__ void add_up(const float* parts, const Share& share, int tile, void* y, int count) {
    constexpr int VECTORS = ROWS / 4;
    const int first = share.first(tile), last = share.last(tile);
    for (int i = threadIdx.x; i < VECTORS * count; i += THREADS) {
        const int token = i / VECTORS, row = i % VECTORS * 4;
        float4 sum = make_float4(0, 0, 0, 0);
        for (int block = first; block <= last; block += 8) {
            float4 part[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                part[j] = make_float4(0, 0, 0, 0);
                if (block + j > last) continue;
                const float* at = parts + share.part(block + j, tile) + token * ROWS + row;
                part[j] = __ldcg(reinterpret_cast<const float4*>(at));
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                sum.x += part[j].x, sum.y += part[j].y, sum.z += part[j].z, sum.w += part[j].w;
            }
        }
        const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int64_t at = tile * ROWS + row + j;
            if (N % ROWS == 0 || at < N) put(y, static_cast<int64_t>(token) * N + at, values[j]);
        }
    }
}

// x [*, K] bfloat16, row rows[t] for token t if GATHER; scales as the format stores them; y [count, N];
// parts 2 * blocks * ROWS * TOKENS floats; arrivals one for each tile, zero before and after.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
few_tokens(const char* x, const int* rows, const char* __restrict__ w, const char* __restrict__ scales, void* y,
           float* parts, int* arrivals, int count) {
    __shared__ bool is_last[2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const Share share;
    const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + warp * (DEPTH * SLOT);
    const char* ring_bytes = reinterpret_cast<const char*>(shared) + warp * (DEPTH * SLOT);
    char* staged = reinterpret_cast<char*>(shared) + WARPS * DEPTH * SLOT;

    // Lanes copy what they read themselves; with several scales a step they read one word of each of the row's pieces.
    const int to_lane = PARTS == 1 ? lane * 16 : (t * 8 + g) * 16;
    int ahead_tile = share.begin / STEPS, ahead_step = share.begin % STEPS;
    auto fetch = [&](int slot) {
        const uint32_t to = ring + slot * SLOT;
        const int first = ahead_tile * ROWS + warp * (16 * TILES);
        const char* from = w + (first + g) * ROW_BYTES + ahead_step * STEP_BYTES + 16 * t;
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            const char* row = from + i * (8 * ROW_BYTES);
            if (N % ROWS && first + 8 * i + g >= N) row = w + ahead_step * STEP_BYTES + 16 * t;  // any row: not stored
            copy<16>(to + i * 512 + to_lane, row);
        }
        if (lane < 16 * TILES) {  // the words that hold the step's scales
            const int row = N % ROWS ? min(first + lane, N - 1) : first + lane;
            const int64_t index = (static_cast<int64_t>(row) * STEPS + ahead_step) * PARTS / 2 * 2;
            copy<SCALE_BYTES>(to + CODES + SCALE_BYTES * lane, scales + index * 2);
        }
        if (++ahead_step == STEPS) ahead_step = 0, ++ahead_tile;
    };
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        if (share.begin + i < share.end) fetch(i);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
#if PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif

    const uint4* source[UNITS];  // what this thread stages of every chunk of activations
    uint4 ahead[UNITS];
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
        const int unit = threadIdx.x + j * THREADS, token = unit / (16 * CHUNK);
        source[j] = nullptr;
        if (token < TOKENS && token < count) {
            const int64_t row = GATHER ? rows[token] : token;
            source[j] = reinterpret_cast<const uint4*>(x + row * (2 * K)) + unit % (16 * CHUNK);
        }
    }
    auto load = [&](int step) {
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
            const int block = (threadIdx.x + j * THREADS) / 16 % CHUNK;
            const bool real = source[j] && step + block < STEPS;  // a share may begin in the middle of a chunk
            ahead[j] = real ? source[j][step * 16] : make_uint4(0, 0, 0, 0);
        }
    };
    auto stage = [&](int buffer) {
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
            const int unit = threadIdx.x + j * THREADS, token = unit / (16 * CHUNK), block = unit / 16 % CHUNK;
            float scale;
            const uint4 made = prepare(ahead[j], scale);
            if (token >= TOKENS) break;
            char* to = staged + buffer * STAGED;
            char* column = to + 2 * token * PITCH + block * 128 + place(unit % 16);
            *reinterpret_cast<uint2*>(column) = make_uint2(made.x, made.y);
            *reinterpret_cast<uint2*>(column + PITCH) = make_uint2(made.z, made.w);
            if (unit % 16 == 0) reinterpret_cast<float*>(to + 2 * TOKENS * PITCH)[block * TOKENS + token] = scale;
        }
    };

    float sums[TILES][QUADS][2] = {};  // rows g and g + 8, token 4 n + t
    auto store = [&](int tile, bool whole) {
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int local = (warp * TILES + m) * 16 + 8 * half + g, row = tile * ROWS + local;
                if (N % ROWS && row >= N) continue;
#pragma unroll
                for (int n = 0; n < QUADS; ++n) {
                    const int token = 4 * n + t;
                    const float value = sums[m][n][half] * 0.0625f;
                    if (token >= count) continue;
                    if (whole) put(y, static_cast<int64_t>(token) * N + row, value);
                    else parts[share.part(blockIdx.x, tile) + token * ROWS + local] = value;
                }
            }
        }
    };

    int tile = share.begin / STEPS, step = share.begin % STEPS, in_tile = 0, in_chunk = 0, buffer = 0, slot = 0;
    int early = -1, ticket = -1;  // the first tile, if it is shared: its part is stored before the end, and its arrival told
    bool told = true;
    load(step);
    for (int left = share.end - share.begin; left > 0; --left) {
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
        if (in_chunk == 0) {
            buffer ^= 1;
            stage(buffer);
            load(step + CHUNK < STEPS ? step + CHUNK : 0);
            __syncthreads();  // also: every warp is done with the chunk before the last, whose place comes next
            if (!told && threadIdx.x == 0) {
                __threadfence();
                ticket = atomicAdd(arrivals + early, 1);
            }
            told = true;
        } else {
            __syncwarp();  // scales, and words, come from other lanes
        }
        const char* codes = ring_bytes + slot * SLOT;
        const char* xs = staged + buffer * STAGED + g * PITCH + in_chunk * 128 + t * 16;
        const float* x_scales = reinterpret_cast<const float*>(staged + buffer * STAGED + 2 * TOKENS * PITCH) + in_chunk * TOKENS + t;
        int products[TILES][QUADS][4] = {};
        auto scale = [&](int part) {  // products to sums
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                float of_rows[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int local = 16 * m + 8 * half + g;
                    const char* at = codes + CODES + SCALE_BYTES * local;
                    const int odd = PARTS > 1 ? part : STEPS % 2 ? (tile * ROWS + warp * 16 * TILES + local + step) % 2 : step % 2;
                    of_rows[half] = low(reinterpret_cast<const uint16_t*>(at)[odd]);
                }
#pragma unroll
                for (int n = 0; n < QUADS; ++n) {
                    const float of_x = x_scales[4 * n];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        int* two = products[m][n] + 2 * half;
                        sums[m][n][half] += static_cast<float>(two[0] * 256 + two[1]) * (of_x * of_rows[half]);
                        two[0] = two[1] = 0;
                    }
                }
            }
        };
        uint4 words[2 * TILES];
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            const char* at = codes + i * 512;
            if constexpr (PARTS == 1) {
                words[i] = *reinterpret_cast<const uint4*>(at + lane * 16);
            } else {
                const uint32_t* word = reinterpret_cast<const uint32_t*>(at) + lane;
                words[i] = make_uint4(word[0], word[32], word[64], word[96]);
            }
        }
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            uint4 columns[QUADS];
#pragma unroll
            for (int n = 0; n < QUADS; ++n) columns[n] = *reinterpret_cast<const uint4*>(xs + n * 8 * PITCH + q * 64);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int word = 2 * q + r;
#pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    uint32_t a[4];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t* of_row = reinterpret_cast<const uint32_t*>(&words[2 * m + half]);
                        a[half] = of_row[word] << 4 & 0xF0F0F0F0u;
                        a[2 + half] = of_row[word] & 0xF0F0F0F0u;
                    }
#pragma unroll
                    for (int n = 0; n < QUADS; ++n) {
                        multiply(products[m][n], a, r ? columns[n].z : columns[n].x, r ? columns[n].w : columns[n].y);
                    }
                }
                if (PARTS == 4 || (PARTS == 2 && r == 1)) scale(PARTS == 4 ? word : q);
            }
        }
        if (PARTS == 1) scale(0);
        __syncwarp();
        if (left > DEPTH) fetch(slot);
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (++slot == DEPTH) slot = 0;
        if (++in_chunk == CHUNK) in_chunk = 0;
        ++in_tile;
        if (++step == STEPS && left > 1) {
            store(tile, in_tile == STEPS);
            if (in_tile < STEPS) early = tile, told = false;
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int n = 0; n < QUADS; ++n) sums[m][n][0] = sums[m][n][1] = 0;
            ++tile, step = in_tile = in_chunk = 0;
        }
    }
    const bool whole = in_tile == STEPS;
    if (in_tile) store(tile, whole);
    if (in_tile == 0 || (whole && early < 0)) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (!told) ticket = atomicAdd(arrivals + early, 1);
        is_last[0] = early >= 0 && ticket == share.last(early) - share.first(early);
        is_last[1] = !whole && atomicAdd(arrivals + tile, 1) == share.last(tile) - share.first(tile);
        __threadfence();
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        if (!is_last[i]) continue;
        const int shared_tile = i ? tile : early;
        add_up(parts, share, shared_tile, y, count);
        if (threadIdx.x == 0) arrivals[shared_tile] = 0;
    }
}
