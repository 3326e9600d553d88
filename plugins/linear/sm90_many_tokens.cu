// y = x W^T on Hopper for tens to hundreds of tokens and integer codes: bfloat16 products, weights decoded in registers.
//
// Two warpgroups take TILES x 64 rows of W each and TOKENS tokens; weights are the first side of wgmma, in registers, tokens
// the second, in shared memory. Each warp copies the codes of its own rows into a ring of its own (cp.async), so weights
// need no barrier; a thread of a third warpgroup fetches activations by TMA. While the tensor cores work on a word of every lane's codes,
// the next is decoded. wint4's scales multiply the decoded weights, rounded to bfloat16; wint8's the sums.
//
// A cluster's blocks share the columns. They leave their sums in shared memory, and each adds up a part of the tokens, in
// the order of the blocks: the same sums in every run.
//
// Activations come with the columns of every 128 in the order in which a lane's registers hold weights
// (`permute_columns` in kernel.py).
//
// Defines: KIND of the weight, GROUP of wint4; N, K (a multiple of 128); TOKENS (64, 128, 256); TILES; DEPTH of the warps'
// rings, STAGES of the activations', in steps of 128 columns; SPLITS, the cluster's size; WIDE: y is float32; PDL;
// SHARED_BYTES.

#include <cstdint>

constexpr int WINT8 = 1, WINT4 = 2;
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int ROWS = 128 * TILES, STEPS = K / 128;
constexpr int PIECES = KIND == WINT4 ? 1 : 2;  // of 16 bytes, of a row's 128 columns, that a lane copies
constexpr int STEP_BYTES = 64 * PIECES;
constexpr int64_t ROW_BYTES = STEPS * STEP_BYTES;
constexpr int PARTS = KIND == WINT4 ? 128 / GROUP : 1;  // scales of a row and step
constexpr int SCALE_BYTES = KIND == WINT4 ? (PARTS == 4 ? 8 : 4) : 0;
constexpr int CODES = 2 * TILES * PIECES * 32 * 16, SLOT = CODES + 16 * TILES * SCALE_BYTES;
constexpr int BOX = TOKENS * 128, STAGE = 2 * BOX;  // bytes: 64 columns in the 128-byte swizzle, and a step
constexpr int PITCH = ROWS + 4;  // floats of a token's sums in shared memory: lanes do not collide
constexpr int RINGS = STAGES * STAGE + 8 * DEPTH * SLOT, SUMS = TOKENS * PITCH * 4;
static_assert((RINGS > SUMS ? RINGS : SUMS) + STAGES * 16 == SHARED_BYTES, "the launch asks for this much");

struct alignas(64) TensorMap {
    char bytes[128];
};

extern __shared__ __align__(1024) uint8_t shared[];

__device__ __forceinline__ uint32_t address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

template <int BYTES> __device__ __forceinline__ void copy(uint32_t to, const void* from) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
    }
}

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

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }

__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// A row's part of two products: pairs of columns for the first and second half of each. `words`: one of wint4, two of wint8.
__device__ __forceinline__ void decode(uint32_t* pairs, const uint32_t* words, uint32_t scale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (KIND == WINT4) {  // nibble n: the bits 0x4300 | (n ^ 8) are 128 + n + 8
            uint32_t bits;
            asm("lop3.b32 %0, %1, 0x000F000F, 0x43084308, 0x6A;" : "=r"(bits) : "r"(words[0] >> (4 * i)));
            pairs[i] = fma_bf16x2(fma_bf16x2(bits, 0x3F803F80u, 0xC308C308u), scale, 0x80008000u);
        } else {  // int8 b: 128 + (b & 127), less 128 or, if b is negative, 256
            uint32_t bytes = __byte_perm(words[i / 2], 0, i % 2 ? 0x4342 : 0x4140), size, less;
            asm("lop3.b32 %0, %1, 0x007F007F, 0x43004300, 0xEA;" : "=r"(size) : "r"(bytes));
            asm("lop3.b32 %0, %1, 0x00800080, 0x43004300, 0xEA;" : "=r"(less) : "r"(bytes));
            pairs[i] = fma_bf16x2(less, 0xBF80BF80u, size);
        }
    }
}

#define OUT4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define OUT16(i) OUT4(i), OUT4((i) + 4), OUT4((i) + 8), OUT4((i) + 12)
#define OUT32(i) OUT16(i), OUT16((i) + 16)
#if TOKENS == 64
#define SHAPE "m64n64k16"
#define OUTS OUT32(0)
#define NAMES "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define INPUTS "{%32,%33,%34,%35}, %36"
#elif TOKENS == 128
#define SHAPE "m64n128k16"
#define OUTS OUT32(0), OUT32(32)
#define NAMES                                                                                                                  \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"    \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,"  \
    "%62,%63"
#define INPUTS "{%64,%65,%66,%67}, %68"
#else
#define SHAPE "m64n256k16"
#define OUTS OUT32(0), OUT32(32), OUT32(64), OUT32(96)
#define NAMES                                                                                                                  \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"    \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,"  \
    "%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,"  \
    "%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,"     \
    "%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define INPUTS "{%128,%129,%130,%131}, %132"
#endif

// d += a b: 64 rows of weights in a warpgroup's registers, TOKENS columns of shared memory, 16 deep. Asynchronous.
__device__ __forceinline__ void multiply(float (&d)[TOKENS / 2], const uint32_t* a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 {" NAMES "}, " INPUTS ", 1, 1, 1, 0;"
                 : OUTS
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <int PENDING> __device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ uint32_t bfloat16_pair(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Four rows of a token.
__device__ __forceinline__ void put(void* y, int64_t at, const float* values) {
#if WIDE
    *reinterpret_cast<float4*>(static_cast<float*>(y) + at) = make_float4(values[0], values[1], values[2], values[3]);
#else
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(y) + at) =
        make_uint2(bfloat16_pair(values[0], values[1]), bfloat16_pair(values[2], values[3]));
#endif
}

// x: the map of [count, K] bfloat16, permuted; scales as the format stores them; y [count, N]. N is a multiple of 4.
// Grid: SPLITS, tiles of tokens, tiles of rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sm90_many_tokens(const __grid_constant__ TensorMap x, const char* __restrict__ w, const char* __restrict__ scales, void* y,
                 int count) {
    static_assert(N % 4 == 0);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x, first_token = blockIdx.y * TOKENS, first_row = blockIdx.z * ROWS;
    const int begin = split * STEPS / SPLITS, steps = (split + 1) * STEPS / SPLITS - begin;
    const uint32_t base = address(shared), barriers = base + SHARED_BYTES - STAGES * 16;  // full, then free
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 8;" ::"r"(barriers + 8 * (STAGES + i)));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#if PDL
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;");
#endif
        if (threadIdx.x == CONSUMERS) {
            for (int i = 0; i < steps; ++i) {
                const int stage = i % STAGES;
                const uint32_t full = barriers + 8 * stage, to = base + stage * STAGE;
                if (i >= STAGES) wait_for(barriers + 8 * (STAGES + stage), (i / STAGES + 1) % 2);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "n"(STAGE) : "memory");
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    asm volatile(
                        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                            to + half * BOX), "l"(&x), "r"((begin + i) * 128 + 64 * half), "r"(first_token), "r"(full) : "memory");
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        float sums[TILES][TOKENS / 2] = {};
        // Warp w of a warpgroup has rows 16 w.. of each of its tiles of 64.
        const int warp_row = first_row + warp / 4 * (64 * TILES) + warp % 4 * 16;
        const uint32_t ring = base + STAGES * STAGE + warp * (DEPTH * SLOT);
        const uint8_t* ring_bytes = shared + STAGES * STAGE + warp * (DEPTH * SLOT);
        const char* from[2 * TILES];
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            const int row = min(warp_row + i / 2 * 64 + i % 2 * 8 + g, N - 1);  // what is beyond is not stored
            from[i] = w + row * ROW_BYTES + begin * STEP_BYTES + 16 * t;
        }
        const int scale_row = min(warp_row + lane / 16 * 64 + lane % 16, N - 1);
        auto fetch = [&](int step, int slot) {
            const uint32_t to = ring + slot * SLOT;
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
#pragma unroll
                for (int p = 0; p < PIECES; ++p) {
                    copy<16>(to + ((i * PIECES + p) * 32 + lane) * 16, from[i] + step * STEP_BYTES + 64 * p);
                }
            }
            if (KIND == WINT4 && lane < 16 * TILES) {  // the words that hold the step's scales
                const int64_t index = (static_cast<int64_t>(scale_row) * STEPS + begin + step) * PARTS / 2 * 2;
                copy<SCALE_BYTES ? SCALE_BYTES : 4>(to + CODES + SCALE_BYTES * lane, scales + index * 2);
            }
        };
        for (int i = 0; i < DEPTH; ++i) {
            if (i < steps) fetch(i, i);
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
#if PDL
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;");
#endif
        uint32_t pairs[2][TILES][2][4];  // of two words in turn; of each tile, for two products
        for (int step = 0, slot = 0, stage = 0, parity = 0; step < steps; ++step) {
            asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
            __syncwarp();  // scales come from other lanes
            const uint8_t* codes = ring_bytes + slot * SLOT;
            uint4 words[2 * TILES][PIECES];
            uint32_t of_row[2 * TILES];
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
#pragma unroll
                for (int p = 0; p < PIECES; ++p) {
                    words[i][p] = *reinterpret_cast<const uint4*>(codes + ((i * PIECES + p) * 32 + lane) * 16);
                }
                of_row[i] = 0;
                if constexpr (KIND == WINT4) {  // of the lane's 32 columns
                    const int local = i / 2 * 16 + i % 2 * 8 + g;
                    const int row = min(warp_row + i / 2 * 64 + i % 2 * 8 + g, N - 1);
                    const int part = PARTS == 4 ? t : PARTS == 2 ? t / 2 : (static_cast<int64_t>(row) * STEPS + begin + step) % 2;
                    const uint16_t scale = reinterpret_cast<const uint16_t*>(codes + CODES + SCALE_BYTES * local)[part];
                    of_row[i] = scale * 0x10001u;
                }
            }
            __syncwarp();
            if (step + DEPTH < steps) fetch(step + DEPTH, slot);
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (++slot == DEPTH) slot = 0;

            wait_for(barriers + 8 * stage, parity);
            const uint64_t columns = (1ull << 62) | (64ull << 32) | (1ull << 16) | ((base + stage * STAGE) >> 4);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                wait_for_products<1>();
                if (q == 1 && step > 0 && lane == 0) {  // all products of the step before are done
                    const uint32_t free = barriers + 8 * (STAGES + (stage ? stage : STAGES) - 1);
                    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(free) : "memory");
                }
                auto& ready = pairs[q % 2];
#pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    uint32_t halves[2][4];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t* all = reinterpret_cast<const uint32_t*>(words[2 * m + half]);
                        decode(halves[half], all + (KIND == WINT4 ? q : 2 * q), of_row[2 * m + half]);
                    }
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        ready[m][e][0] = halves[0][2 * e], ready[m][e][1] = halves[1][2 * e];
                        ready[m][e][2] = halves[0][2 * e + 1], ready[m][e][3] = halves[1][2 * e + 1];
                    }
                }
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int depth = 2 * q + e;  // of eight times 16 columns
                    const uint64_t b = columns + (depth / 4 * BOX + depth % 4 * 32) / 16;
#pragma unroll
                    for (int m = 0; m < TILES; ++m) multiply(sums[m], ready[m][e], b);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            }
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        wait_for_products<0>();
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");  // nobody reads a ring any more
        float* mine = reinterpret_cast<float*>(shared);
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            const int row = warp / 4 * (64 * TILES) + m * 64 + warp % 4 * 16 + g;
#pragma unroll
            for (int n = 0; n < TOKENS / 8; ++n) {
#pragma unroll
                for (int c = 0; c < 4; ++c) mine[(8 * n + 2 * t + c % 2) * PITCH + row + c / 2 * 8] = sums[m][4 * n + c];
            }
        }

        if (SPLITS > 1) cluster_sync();  // of the threads that have not ended
        else asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
        constexpr int SHARE = TOKENS / SPLITS, VECTORS = ROWS / 4;
        for (int i = threadIdx.x; i < SHARE * VECTORS; i += CONSUMERS) {
            const int local = split * SHARE + i / VECTORS, token = first_token + local, row = first_row + i % VECTORS * 4;
            if (token >= count || row >= N) continue;
            float values[4] = {};
#pragma unroll
            for (int other = 0; other < SPLITS; ++other) {
                uint32_t at = base + (local * PITCH + i % VECTORS * 4) * 4;
                float part[4];
                if (SPLITS > 1) asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(other));
                asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(part[0]), "=f"(part[1]), "=f"(part[2]), "=f"(part[3])
                             : "r"(at)
                             : "memory");
#pragma unroll
                for (int j = 0; j < 4; ++j) values[j] += part[j];
            }
            if constexpr (KIND == WINT8) {
#pragma unroll
                for (int j = 0; j < 4; ++j) values[j] *= low(reinterpret_cast<const uint16_t*>(scales)[row + j]);
            }
            put(y, static_cast<int64_t>(token) * N + row, values);
        }
        if (SPLITS > 1) cluster_sync();  // others may still read this block's sums
    }
}
