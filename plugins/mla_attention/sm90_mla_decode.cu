// Absorbed MLA attention on Hopper over the paged bfloat16 latent cache: 64 query rows against a range of one
// sequence's keys at a time, normalized, with the log-sum-exp that merging the ranges needs.
//
// Four warpgroups. One thread of the first fetches by TMA. The second multiplies queries by keys and takes the softmax.
// The third and fourth sum values, half of the 512 columns each: a 64 x 512 accumulator is too large for one. A tile of 64
// keys lies in shared memory once, as keys and as values; its probabilities replace its rope part, which is read no more
// by then. Blocks take pieces of work blockIdx.x, blockIdx.x + gridDim.x, ... of a list made on the device.
#include "sm90.cuh"

#ifndef HEADS
#define HEADS 128
#endif

namespace {

constexpr int ROWS = 64, KEYS = 64, LATENT = 512, ROPE = 64, CHUNKS = (LATENT + ROPE) / 64;
constexpr int CHUNK_BYTES = 64 * 128;                // 64 rows of 64 bfloat16 in the 128-byte swizzle of TMA and wgmma
constexpr int TILE_BYTES = CHUNKS * CHUNK_BYTES;     // 73728
constexpr int GROUPS = 3;                            // chunks of a key tile arrive in three groups of three
constexpr int GROUP_BYTES = TILE_BYTES / GROUPS;
constexpr int P_OFFSET = (LATENT / 64) * CHUNK_BYTES;  // the rope chunk, then the probabilities
constexpr int PARTS = 2;                             // a tile's probabilities are handed on in two halves of its keys
constexpr float STALE = 8.0f;                        // the maximum is renewed when a score exceeds it by 2^8

struct Piece {                                       // a row of the work list
    int sequence, first_row, rows, begin, end, visible, local, unused;
};

struct Shared {
    uint8_t q[TILE_BYTES];
    uint8_t k[2][TILE_BYTES];
    float alpha[2][ROWS];                            // factor of the sums before a tile is added
    float inverse[2][ROWS];                          // 1 / sum of probabilities, by parity of the piece
    uint64_t q_full, q_free, k_full[2][GROUPS], k_free[2], p_full[2][PARTS], inverse_full[2];
};

// The same address, of which the compiler knows nothing: so it adds offsets where they are used, rather than keeping a
// register for each of 36 descriptors.
__device__ __forceinline__ uint32_t opaque(uint32_t address) {
    asm volatile("" : "+r"(address));
    return address;
}

#define F(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3])
#define F16(a, i) F(a, i), F(a, i + 4), F(a, i + 8), F(a, i + 12)

// s [64, 64] (+)= a [64, 16] b [64, 16]^T, both with k contiguous.
__device__ __forceinline__ void multiply_keys(float (&s)[32], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0;\n"
        "}\n"
        : F16(s, 0), F16(s, 16)
        : "l"(a), "l"(b), "r"(add));
}

// o [64, 128] (+)= a [64, 16] b [16, 128], the columns of b contiguous. Twice 128 columns are as fast as 256, and the
// compiler takes no wider instruction in a kernel of 512 threads.
__device__ __forceinline__ void multiply_values(float (&o)[64], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 1;\n"
        "}\n"
        : F16(o, 0), F16(o, 16), F16(o, 32), F16(o, 48)
        : "l"(a), "l"(b), "r"(add));
}

__device__ __forceinline__ Piece load_piece(const int* plan, int index) {
    const int4* row = reinterpret_cast<const int4*>(plan) + 2 * (1 + index);
    const int4 a = row[0], b = row[1];
    return Piece{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

__device__ __forceinline__ void produce(Shared& shared, const CUtensorMap* queries, const CUtensorMap* cache,
                                        const int* plan, const int* table, int blocks_per_sequence) {
    const int pieces = plan[0];
    int tile = 0, count = 0;
    for (int index = blockIdx.x; index < pieces; index += gridDim.x, ++count) {
        const Piece piece = load_piece(plan, index);
        const int* blocks = table + static_cast<int64_t>(piece.sequence) * blocks_per_sequence;
        int block = blocks[piece.begin / KEYS];
        for (int key = piece.begin; key < piece.end; key += KEYS, ++tile) {
            const int next = key + KEYS < piece.end ? blocks[key / KEYS + 1] : 0;
            const int buffer = tile & 1, parity = tile >> 1 & 1;
            barrier_wait(&shared.k_free[buffer], parity ^ 1);
            for (int group = 0; group < GROUPS; ++group) {
                uint64_t* full = &shared.k_full[buffer][group];
                barrier_expect(full, GROUP_BYTES);
                fetch(shared.k[buffer] + group * GROUP_BYTES, cache, block * KEYS, group * (CHUNKS / GROUPS), full);
            }
            if (key == piece.begin) {
                barrier_wait(&shared.q_free, count & 1 ^ 1);
                barrier_expect(&shared.q_full, TILE_BYTES);
                fetch(shared.q, queries, piece.first_row, 0, &shared.q_full);
            }
            block = next;
        }
    }
}

// Rows from `first` on of a tile's values become zeros: what lies behind the end of a sequence may be NaN.
__device__ __forceinline__ void clear_values(uint8_t* tile, int first) {
    const int thread = threadIdx.x % 128;
    for (int row = first + thread / 64; row < KEYS; row += 2)
        *reinterpret_cast<uint4*>(tile + (thread % 64 / 8) * CHUNK_BYTES + row * 128 + thread % 8 * 16) = uint4{0, 0, 0, 0};
}

// What the second warpgroup keeps of a piece.
struct Rows {
    int seen[2], all_see;                            // keys that this thread's two rows see, and that every row does
    float highest[2], total[2];
};

__device__ __forceinline__ void start_scores(Shared& shared, int tile, float (&s)[32]) {
    const int buffer = tile & 1, parity = tile >> 1 & 1;
    const uint32_t q_base = opaque(shared_address(shared.q)), k_base = opaque(shared_address(shared.k[buffer]));
    wgmma_fence();
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        barrier_wait(&shared.k_full[buffer][group], parity);
#pragma unroll
        for (int step = 0; step < 4 * CHUNKS / GROUPS; ++step) {
            const int offset = group * GROUP_BYTES + step / 4 * CHUNK_BYTES + step % 4 * 32;
            multiply_keys(s, descriptor(q_base + offset, 16), descriptor(k_base + offset, 16), group + step > 0);
        }
    }
    wgmma_commit();
}

// From a tile's scores to its probabilities and factors in shared memory.
__device__ __forceinline__ void finish_scores(Shared& shared, int tile, int key, const Piece& piece, Rows& rows,
                                              float scale, float (&s)[32]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int buffer = tile & 1;
    uint8_t* const k = shared.k[buffer];
    if (key + KEYS > rows.all_see) {
#pragma unroll
        for (int i = 0; i < 32; ++i)
            if (key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= rows.seen[i / 2 % 2]) s[i] = -INFINITY;
    }
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most = -INFINITY;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = fmaxf(most, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * scale;
        const float now = most > rows.highest[half] + STALE ? most : rows.highest[half];
        base[half] = now == -INFINITY ? 0.0f : now;
        const float alpha = exp2_fast(rows.highest[half] - base[half]);
        rows.highest[half] = now;
        rows.total[half] *= alpha;
        if (lane % 4 == 0) shared.alpha[buffer][row + 8 * half] = alpha;
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int j = 32 / PARTS * part; j < 32 / PARTS * (part + 1); ++j) {
            s[j] = exp2_fast(fmaf(s[j], scale, -base[j / 2 % 2]));
            rows.total[j / 2 % 2] += s[j];
        }
        // All four warps are done with the keys before the rope chunk and the rows behind the end are overwritten.
        if (part == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
#pragma unroll
        for (int i = 8 / PARTS * part; i < 8 / PARTS * (part + 1); ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = (row + 8 * half) * 128 + ((i ^ (row & 7)) << 4) + lane % 4 * 4;
                *reinterpret_cast<uint32_t*>(k + P_OFFSET + at) =
                    pack_bf16(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]);
            }
        if (part == 0 && key + KEYS > piece.end) clear_values(k, piece.end - key);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        warp_arrive(&shared.p_full[buffer][part]);
    }
}

__device__ __forceinline__ void attend(Shared& shared, const int* plan, float* sums, float scale) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int pieces = plan[0];
    int tile = 0, count = 0;
    float s[32];
    for (int index = blockIdx.x; index < pieces; index += gridDim.x, ++count) {
        const Piece piece = load_piece(plan, index);
        Rows rows{{min(piece.visible + (piece.local + row) / HEADS, piece.end),
                   min(piece.visible + (piece.local + row + 8) / HEADS, piece.end)},
                  min(piece.visible + piece.local / HEADS, piece.end),
                  {-INFINITY, -INFINITY},
                  {0.0f, 0.0f}};
        barrier_wait(&shared.q_full, count & 1);
        for (int key = piece.begin; key < piece.end; key += KEYS, ++tile) {
            start_scores(shared, tile, s);
            wgmma_wait<0>();
            pin(s);
            if (key + KEYS >= piece.end) warp_arrive(&shared.q_free);
            finish_scores(shared, tile, key, piece, rows, scale, s);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = rows.total[half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (lane % 4 == 0) {
                shared.inverse[count & 1][row + 8 * half] = sum > 0.0f ? 1.0f / sum : 0.0f;
                sums[index * ROWS + row + 8 * half] = sum > 0.0f ? rows.highest[half] + __log2f(sum) : -INFINITY;
            }
        }
        warp_arrive(&shared.inverse_full[count & 1]);
    }
}

__device__ __forceinline__ void sum_values(Shared& shared, int half, const int* plan, uint32_t* partial) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int pieces = plan[0];
    int tile = 0, count = 0;
    float o[2][64];
    for (int index = blockIdx.x; index < pieces; index += gridDim.x, ++count) {
        const Piece piece = load_piece(plan, index);
        float inverse[2];
        for (int key = piece.begin; key < piece.end; key += KEYS, ++tile) {
            const int buffer = tile & 1, parity = tile >> 1 & 1;
            const uint32_t k_base = shared_address(shared.k[buffer]);
            barrier_wait(&shared.p_full[buffer][0], parity);
            const float alpha[2] = {shared.alpha[buffer][row], shared.alpha[buffer][row + 8]};
            if (key > piece.begin && __any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < 128; ++i) o[i / 64][i % 64] *= alpha[i / 2 % 2];
            }
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int side = i / 2 % 2, step = i / 4 * 2 + i % 2;
                if (i == 4) barrier_wait(&shared.p_full[buffer][1], parity);
                multiply_values(o[side], descriptor(k_base + P_OFFSET + step * 32, 16),
                                descriptor(k_base + (4 * half + side * 2) * CHUNK_BYTES + step * 2048, CHUNK_BYTES),
                                step > 0 || key > piece.begin);
            }
            wgmma_commit();
            if (key + KEYS >= piece.end) {
                barrier_wait(&shared.inverse_full[count & 1], count >> 1 & 1);
                inverse[0] = shared.inverse[count & 1][row];
                inverse[1] = shared.inverse[count & 1][row + 8];
            }
            wgmma_wait<0>();
            pin(o[0]);
            pin(o[1]);
            warp_arrive(&shared.k_free[buffer]);
        }
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            uint32_t* const to = partial + (static_cast<int64_t>(index) * ROWS + row + 8 * side) * (LATENT / 2) + half * 128;
#pragma unroll
            for (int group = 0; group < 8; ++group) {
                uint32_t v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* const pair = &o[group / 4][(group % 4 * 4 + i) * 4 + 2 * side];
                    v[i] = pack_bf16(pair[0] * inverse[side], pair[1] * inverse[side]);
                }
                turn_quad(v);
                if (row + 8 * side < piece.rows)
                    *reinterpret_cast<uint4*>(to + (group * 4 + lane % 4) * 4) = uint4{v[0], v[1], v[2], v[3]};
            }
        }
    }
}

}  // namespace

// queries        [T * HEADS, 576] as (64 columns, rows, 9 chunks): absorbed latent queries, then rotated rope queries
// cache          the blocks' rows, likewise
// plan           [pieces + 1, 8] int32: the number of pieces, then a row for each (struct Piece)
// table          [B, blocks_per_sequence]
// partial, sums  [pieces, 64, 512] bfloat16 and [pieces, 64] log2 of the sum of exponentials
// scale          of the scores, times log2 e
extern "C" __global__ void __launch_bounds__(512, 1)
    sm90_mla_decode(const __grid_constant__ CUtensorMap queries, const __grid_constant__ CUtensorMap cache,
                    const int* __restrict__ plan, const int* __restrict__ table, uint32_t* __restrict__ partial,
                    float* __restrict__ sums, float scale, int blocks_per_sequence) {
    extern __shared__ uint8_t memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-shared_address(memory) & 1023));
    if (threadIdx.x == 0) {
        barrier_init(&shared.q_full, 1);
        barrier_init(&shared.q_free, 4);
        for (int buffer = 0; buffer < 2; ++buffer) {
            for (int group = 0; group < GROUPS; ++group) barrier_init(&shared.k_full[buffer][group], 1);
            barrier_init(&shared.k_free[buffer], 8);
            for (int part = 0; part < PARTS; ++part) barrier_init(&shared.p_full[buffer][part], 4);
            barrier_init(&shared.inverse_full[buffer], 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x == 32) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&queries) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&cache) : "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int group = threadIdx.x / 128;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) produce(shared, &queries, &cache, plan, table, blocks_per_sequence);
    } else if (group == 1) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 112;");
        attend(shared, plan, sums, scale);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 184;");
        sum_values(shared, group - 2, plan, partial);
    }
}
