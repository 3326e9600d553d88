// y = x W^T on Hopper for tens to hundreds of tokens, both sides from shared memory: bfloat16, or e4m3 codes with scales.
//
// A tile is TOKENS by ROWS of the result, a step 128 bytes of each of its rows of x and W. All steps of all tiles are one
// line, which the clusters of the grid cut into equal shares, however many tiles there are. A share may begin and end
// inside a tile: the cluster that has a tile's first steps waits for the sums of those that have its others, which is
// what they do first, and adds them in the order of K: the same sums in every run.
//
// A thread of the last warpgroup fetches steps by TMA into a ring; two warpgroups multiply. Each block of a cluster of
// two has rows of its own and fetches half of the tokens for both. e4m3 products of a step are added to float32 sums
// times both scales, since tensor cores add them with few bits.
//
// Defines: FP8; N (a multiple of 8), K (of 128); TOKENS (64, 128, 256); BLOCKS of 128 rows in a tile, 1 or 2: with 2 each
// warpgroup takes one and all tokens, with 1 half of the tokens; STAGES; CLUSTER (1, 2); WIDE: y is float32; PDL;
// SHARED_BYTES.

#include <cstdint>

constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int ROWS = 128 * BLOCKS, COLUMNS = FP8 ? 128 : 64, STEPS = K / COLUMNS;
constexpr int OWN = BLOCKS == 2 ? TOKENS : TOKENS / 2;  // tokens of a warpgroup
constexpr int PARTS = OWN / 64;                         // products that they take
constexpr int X_BYTES = TOKENS * 128, W_BYTES = ROWS * 128, STAGE = X_BYTES + W_BYTES;
static_assert(OWN % 64 == 0 && PARTS <= 2 && K % COLUMNS == 0 && N % 8 == 0);
static_assert(STAGES * (STAGE + 16) == SHARED_BYTES, "the launch asks for this much");

struct alignas(64) TensorMap {
    char bytes[128];
};

extern __shared__ __align__(1024) uint8_t shared[];

__device__ __forceinline__ void wait_for(uint32_t barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// `to` gets a box of the map at a column and row; in every block of `blocks` (a bit each) if there are two.
__device__ __forceinline__ void fetch(uint32_t to, const TensorMap& map, int column, int row, uint32_t full, uint16_t blocks) {
    if (blocks) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
            "%3}], [%4], %5;" ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(full), "h"(blocks) : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
            "l"(&map), "r"(column), "r"(row), "r"(full) : "memory");
    }
}

#define OUT4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define OUT16(i) OUT4(i), OUT4((i) + 4), OUT4((i) + 8), OUT4((i) + 12)
#define OUTS OUT16(0), OUT16(16), OUT16(32), OUT16(48)
#define NAMES                                                                                                                  \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"    \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,"  \
    "%62,%63"
#if FP8
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NAMES "}, %64, %65, add, 1, 1;\n"
#else
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES "}, %64, %65, add, 1, 1, 0, 0;\n"
#endif

// d = a b, or d += a b: 64 tokens by 128 rows, 32 bytes of each. Asynchronous.
template <bool ADD> __device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n" PRODUCT "}\n" : OUTS : "l"(a), "l"(b), "n"(ADD ? 1 : 0));
}

// All products but the last PENDING groups; d is not read before.
template <int PENDING> __device__ __forceinline__ void wait_for_products(float (&d)[64]) {
    asm volatile("wgmma.wait_group.sync.aligned %64;" : OUTS : "n"(PENDING) : "memory");
}

__device__ __forceinline__ uint64_t matrix(uint32_t at) {  // rows of 128 bytes in the 128-byte swizzle
    return (1ull << 62) | (64ull << 32) | (1ull << 16) | (at >> 4);
}

__device__ __forceinline__ uint32_t bfloat16_pair(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// A lane has columns 2 t and 2 t + 1 of every 8 of a token: stores them, `at` being the token's first.
__device__ __forceinline__ void put(void* y, int64_t at, int first_row, bool stored, const float (&d)[64], int half, int t) {
#if WIDE
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        float2* to = reinterpret_cast<float2*>(static_cast<float*>(y) + at + first_row + 8 * n + 2 * t);
        if (stored && first_row + 8 * n < N) *to = make_float2(d[4 * n + 2 * half], d[4 * n + 2 * half + 1]);
    }
#else
#pragma unroll
    for (int n = 0; n < 16; n += 4) {  // four lanes exchange four pairs, so that each has 8 columns
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = bfloat16_pair(d[4 * (n + i) + 2 * half], d[4 * (n + i) + 2 * half + 1]);
#pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i & bit) continue;
                const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, t & bit ? pairs[i] : pairs[i | bit], bit);
                if (t & bit) pairs[i] = got;
                else pairs[i | bit] = got;
            }
        }
        const int row = first_row + 8 * (n + t);
        uint4* to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(y) + at + row);
        if (stored && row < N) *to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
#endif
}

// The line of steps of `count` tokens: where a cluster's share begins.
struct Line {
    int tiles_m, clusters;
    int64_t all;
    __device__ __forceinline__ explicit Line(int count)
        : tiles_m((count + TOKENS - 1) / TOKENS),
          clusters(gridDim.x / CLUSTER),
          all(static_cast<int64_t>(tiles_m) * ((N + ROWS * CLUSTER - 1) / (ROWS * CLUSTER)) * STEPS) {}
    __device__ __forceinline__ int share(int of) const { return static_cast<int>(of * all / clusters); }
};

// x: the map of [count, K], w: of [N, K]; FP8: scales of x float32 [K/128, count], of w float32 [ceil(N/128), K/128].
// parts float32 [grid, TOKENS, ROWS], arrivals int32 [grid], zeros before and after. The grid is a multiple of CLUSTER.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sm90_stream_k(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const float* __restrict__ x_scales,
              const float* __restrict__ w_scales, void* y, float4* parts, int* arrivals, int count) {
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // known to be a warp's
    const int rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER;
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared)), barriers = base + STAGES * STAGE;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {  // full, then free
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barriers + 8 * (STAGES + i)), "n"(8 * CLUSTER));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CLUSTER > 1) cluster_sync();
    else __syncthreads();

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == CONSUMERS) {
            const Line line(count);
            const int tiles_m = line.tiles_m, begin = line.share(cluster), end = line.share(cluster + 1);
            auto rows_of = [&](int unit, int stage) {
                const uint32_t full = barriers + 8 * stage;
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "n"(STAGE) : "memory");
                const int row = (unit / STEPS / tiles_m * CLUSTER + rank) * ROWS;
                fetch(base + stage * STAGE + X_BYTES, w, unit % STEPS * COLUMNS, row, full, 0);
            };
            auto tokens_of = [&](int unit, int stage) {
                const int token = unit / STEPS % tiles_m * TOKENS + rank * (TOKENS / CLUSTER);
                const uint32_t to = base + stage * STAGE + rank * (X_BYTES / CLUSTER);
                fetch(to, x, unit % STEPS * COLUMNS, token, barriers + 8 * stage, CLUSTER > 1 ? 3 : 0);
            };
            const int ahead = min(end, begin + STAGES);  // weights depend on nothing before
#pragma unroll 1
            for (int unit = begin; unit < ahead; ++unit) rows_of(unit, unit - begin);
#if PDL
            asm volatile("griddepcontrol.wait;" ::: "memory");
            asm volatile("griddepcontrol.launch_dependents;");
#endif
#pragma unroll 1
            for (int unit = begin; unit < ahead; ++unit) tokens_of(unit, unit - begin);
#pragma unroll 1
            for (int unit = ahead, stage = 0, parity = 0; unit < end; ++unit) {
                wait_for(barriers + 8 * (STAGES + stage), parity);
                rows_of(unit, stage);
                tokens_of(unit, stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#if PDL
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;");
#endif
        const Line line(count);
        const int tiles_m = line.tiles_m, begin = line.share(cluster), end = line.share(cluster + 1);
        const int group = warp / 4, g = lane / 4, t = lane % 4;
        const int own_token = (BLOCKS == 2 ? 0 : group * OWN) + warp % 4 * 16 + g;  // in a tile; others 8 and 64 further
        const int own_block = BLOCKS == 2 ? group : 0;
        auto release = [&](int stage) {
            if (lane >= CLUSTER) return;
            uint32_t at = barriers + 8 * (STAGES + stage);
            if (CLUSTER > 1) asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(lane));
            asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(at) : "memory");
        };
        int stage = 0, parity = 0;
        for (int unit = begin; unit < end;) {
            const int tile = unit / STEPS, first = unit % STEPS, steps = min(end - unit, STEPS - first);
            const int token = tile % tiles_m * TOKENS + own_token, row = (tile / tiles_m * CLUSTER + rank) * ROWS + own_block * 128;
            float sums[PARTS][64] = {};
#if FP8
            const float* of_rows = w_scales + static_cast<int64_t>(min(row / 128, (N + 127) / 128 - 1)) * STEPS;
            float next[PARTS][2], next_row;
            auto scales_of = [&](int step) {
                next_row = of_rows[step];
#pragma unroll
                for (int i = 0; i < 2 * PARTS; ++i) {
                    next[i / 2][i % 2] = x_scales[static_cast<int64_t>(step) * count + min(token + i / 2 * 64 + i % 2 * 8, count - 1)];
                }
            };
            scales_of(first);
#endif
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
#if FP8
                float scales[PARTS][2];
#pragma unroll
                for (int i = 0; i < 2 * PARTS; ++i) scales[i / 2][i % 2] = next[i / 2][i % 2] * next_row;
                scales_of(min(first + step + 1, STEPS - 1));
#endif
                wait_for(barriers + 8 * stage, parity);
                const uint64_t a = matrix(base + stage * STAGE + (BLOCKS == 2 ? 0 : group * OWN * 128));
                const uint64_t b = matrix(base + stage * STAGE + X_BYTES + own_block * (128 * 128));
#pragma unroll
                for (int i = 0; i < PARTS; ++i) {
#if FP8
                    float part[64];
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                    multiply<false>(part, a + i * 512, b);
#pragma unroll
                    for (int k = 1; k < 4; ++k) multiply<true>(part, a + i * 512 + 2 * k, b + 2 * k);
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                    wait_for_products<0>(part);
                    if (i == PARTS - 1) release(stage);
#pragma unroll
                    for (int c = 0; c < 64; ++c) sums[i][c] += part[c] * scales[i][c / 2 % 2];
#else
                    if (i == 0) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (int k = 0; k < 4; ++k) multiply<true>(sums[i], a + i * 512 + 2 * k, b + 2 * k);
#endif
                }
#if !FP8
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (step > 0) release((stage ? stage : STAGES) - 1);  // all products of the step before are done
#endif
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
#if !FP8
#pragma unroll
            for (int i = 0; i < PARTS; ++i) wait_for_products<0>(sums[i]);
            release((stage ? stage : STAGES) - 1);
#endif
            unit += steps;

            constexpr int VECTORS = PARTS * 16;
            if (first > 0) {  // another has this tile's first steps
                float4* to = parts + static_cast<int64_t>(blockIdx.x) * (VECTORS * CONSUMERS) + threadIdx.x;
#pragma unroll
                for (int i = 0; i < VECTORS; ++i) {
                    const float* d = &sums[i / 16][i % 16 * 4];
                    __stcg(to + i * CONSUMERS, make_float4(d[0], d[1], d[2], d[3]));
                }
                __threadfence();
                asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
                if (threadIdx.x == 0) {
                    asm volatile("st.release.gpu.global.b32 [%0], 1;" ::"l"(arrivals + blockIdx.x) : "memory");
                }
                continue;
            }
            const int tile_end = (tile + 1) * STEPS;
            for (int other = cluster + 1, from = end; unit < tile_end && from < tile_end; ++other) {
                const int upto = line.share(other + 1);
                if (upto == from) continue;  // more clusters than steps
                from = upto;
                const int block = other * CLUSTER + rank;
                if (threadIdx.x == 0) {
                    int there;
                    do {
                        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(there) : "l"(arrivals + block) : "memory");
                    } while (!there);
                    arrivals[block] = 0;
                }
                asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
                const float4* of = parts + static_cast<int64_t>(block) * (VECTORS * CONSUMERS) + threadIdx.x;
#pragma unroll
                for (int i = 0; i < VECTORS; ++i) {
                    const float4 part = __ldcg(of + i * CONSUMERS);
                    float* d = &sums[i / 16][i % 16 * 4];
                    d[0] += part.x, d[1] += part.y, d[2] += part.z, d[3] += part.w;
                }
            }
#pragma unroll
            for (int i = 0; i < 2 * PARTS; ++i) {
                const int at = token + i / 2 * 64 + i % 2 * 8;
                put(y, static_cast<int64_t>(at) * N, row, at < count, sums[i / 2], i % 2, t);
            }
        }
    }
    if (CLUSTER > 1) cluster_sync();  // the other block may still write to this one's shared memory
}
