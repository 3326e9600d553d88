// Experts of a few tokens: weights stream once from device memory to tensor cores, every thread its own part of them.
//
// A block takes 16 rows per row warp of gate and as many of up (moe_gate_up), or 32 of down (moe_down), for one tile of at
// most TILE tokens of one expert; K_WARPS warps share the columns. How weights and activations meet: experts.cuh. fp8
// activations come as codes with scales, and gate_up's block of 128 rows, a group of what enters down, makes codes of them.
//
// Defines: EXPERT_KIND, EXPERT_UE8M0, EXPERT_DEPTH of the ring; SHARED_KIND (-1: no shared expert here), SHARED_UE8M0,
// SHARED_DEPTH; D, F, SHARED_F; TOP_K; TILE (8, 16, 32); ROW_WARPS, K_WARPS; CHUNK blocks of activations between barriers;
// PDL; LATE: what the predecessor waited for is all that this reads; BLOCKS_PER_SM.

#include "experts.cuh"

constexpr int WARPS = ROW_WARPS * K_WARPS, THREADS = 32 * WARPS;
constexpr int PITCH = CHUNK * 256 + 64;  // bytes of a token's activations: 64 beyond whole banks, so that lanes do not collide
constexpr int UNITS = (K_WARPS * TILE * CHUNK * 16 + THREADS - 1) / THREADS;  // of eight activations, staged by a thread
constexpr int STAGED = 2 * K_WARPS * TILE * PITCH, STAGED_SCALES = 2 * K_WARPS * CHUNK * TILE * 4;

extern __shared__ uint4 shared[];

__device__ __forceinline__ void wait_for_predecessor() {
#if PDL && LATE
    asm volatile("griddepcontrol.launch_dependents;");
#elif PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Ends the last block after the predecessor, so that who waits for this grid has waited for both. The others make room.
struct After {
    __device__ __forceinline__ ~After() {
#if PDL && LATE
        if (blockIdx.x == gridDim.x - 1) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    }
};

// Eight activations as they lie, fp8 in the first 8 bytes, as the products take them.
template <int KIND> __device__ __forceinline__ uint4 prepare(uint4 x) {
    if constexpr (KIND == WINT4) return as_nibbles(x);
    if constexpr (KIND == FP8) {
        return make_uint4(e4m3_to_half(x.x, false), e4m3_to_half(x.x, true), e4m3_to_half(x.y, false), e4m3_to_half(x.y, true));
    }
    return x;
}

struct Activations {  // rows of K; scales of codes: [K / 128, step]
    const char* data;
    const float* scales;
    int step;
};

// sums[m][n/8] of the block's rows times its tokens, in the mma's layout; rows of the second matrix: `second`.
// ONE: a warp's rows are 32 of one matrix, `first`, and `second` is the same.
template <int KIND, int DEPTH, int K, bool ONE, int TOKENS>
__device__ __forceinline__ void product(float (&sums)[2][TOKENS / 8][4], Rows first, Rows second, int first_row,
                                        Activations x, const int* x_rows, int tokens, bool waited) {
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
    uint32_t source[UNITS];  // in eights
    int last[UNITS];
    #pragma unroll
    for (int j = 0; j < UNITS; ++j) {
        int at = threadIdx.x + j * THREADS, token = at / (16 * CHUNK) % TILE, part = at / (16 * CHUNK * TILE);
        int block = part * BLOCKS / K_WARPS + at / 16 % CHUNK;
        bool real = part < K_WARPS && token < tokens;
        last[j] = real ? (part + 1) * BLOCKS / K_WARPS - block : 0;
        source[j] = (real ? x_rows[token] : 0) * (K / 8) + block * 16 + at % 16;
    }
    uint4 ahead[UNITS];
    float scales_ahead[UNITS];
    auto load = [&](int chunk) {
        #pragma unroll
        for (int j = 0; j < UNITS; ++j) {
            const uint32_t from = source[j] + chunk * (CHUNK * 16);
            const bool there = chunk * CHUNK < last[j];
            if constexpr (KIND == FP8) {
                const uint2 codes = there ? reinterpret_cast<const uint2*>(x.data)[from] : make_uint2(0, 0);
                ahead[j] = make_uint4(codes.x, codes.y, 0, 0);
                const bool first = there && threadIdx.x % 16 == 0;
                scales_ahead[j] = first ? x.scales[static_cast<size_t>(from % (K / 8) / 16) * x.step + from / (K / 8)] : 0;
            } else {
                ahead[j] = there ? reinterpret_cast<const uint4*>(x.data)[from] : make_uint4(0, 0, 0, 0);
            }
        }
    };
    auto stage = [&](int buffer) {
        #pragma unroll
        for (int j = 0; j < UNITS; ++j) {
            int at = threadIdx.x + j * THREADS, part_token = at / (16 * CHUNK), block = at / 16 % CHUNK;
            if (part_token >= K_WARPS * TILE) break;
            char* to = staged + (buffer * K_WARPS * TILE + part_token) * PITCH + block * 256;
            *reinterpret_cast<uint4*>(to + place<KIND>(at % 16) * 16) = prepare<KIND>(ahead[j]);
            if (KIND == FP8 && at % 16 == 0) {
                int part = part_token / TILE, token = part_token % TILE;
                staged_scales[((buffer * K_WARPS + part) * CHUNK + block) * TILE + token] = scales_ahead[j];
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

// What enters down: bfloat16, or e4m3 codes.
template <int KIND> using Hidden = std::conditional_t<KIND == FP8, uint8_t, uint16_t>;

// h[first + token, row + ...] = silu(gate) * up for a tile. h_scales [WIDTH / 128, h_rows], of codes.
template <int KIND, bool POWERS, int DEPTH, int WIDTH, int TOKENS>
__device__ __forceinline__ void gate_up(Rows gate, Rows up, int row, Activations x, const int* x_rows, int tokens, int first,
                                        Hidden<KIND>* h, float* h_scales, int h_rows, bool waited) {
    static_assert(KIND != FP8 || (ROW_WARPS == 8 && K_WARPS == 1));
    float sums[2][TOKENS / 8][4] = {};
    product<KIND, DEPTH, D, false, TOKENS>(sums, gate, up, row, x, x_rows, tokens, waited);
    add_up<TOKENS>(&sums[0][0][0]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp >= ROW_WARPS) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = warp * 16 + half * 8 + lane / 4;
        const float of_gate = row_scale<KIND>(gate, at), of_up = row_scale<KIND>(up, at);
#pragma unroll
        for (int i = 0; i < TOKENS / 4; ++i) {
            const float a = sums[0][i / 2][2 * half + i % 2] * of_gate, b = sums[1][i / 2][2 * half + i % 2] * of_up;
            sums[0][i / 2][2 * half + i % 2] = a / (1.0f + __expf(-a)) * b;
        }
    }
    float scales[TOKENS / 4];  // of this lane's tokens
    if constexpr (KIND == FP8) {
        float* largest = reinterpret_cast<float*>(shared);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TOKENS / 4; ++i) {
            float most = fmaxf(fabsf(sums[0][i / 2][i % 2]), fabsf(sums[0][i / 2][2 + i % 2]));
#pragma unroll
            for (int far = 4; far < 32; far *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, far));
            if (lane < 4) largest[(i / 2 * 8 + lane * 2 + i % 2) * ROW_WARPS + warp] = most;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TOKENS / 4; ++i) {
            const int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
            const float4* of = reinterpret_cast<const float4*>(largest + token * ROW_WARPS);
            const float4 a = of[0], b = of[1];
            scales[i] = scale_of<POWERS>(fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w))));
            if (warp == 0 && lane < 4 && token < tokens) h_scales[row / 128 * h_rows + first + token] = scales[i];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < TOKENS / 4; ++i) {
            const int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
            const float value = sums[0][i / 2][2 * half + i % 2];
            if (token >= tokens) continue;
            Hidden<KIND>& to = h[static_cast<size_t>(first + token) * WIDTH + row + warp * 16 + half * 8 + lane / 4];
            if constexpr (KIND == FP8) {
                to = static_cast<uint8_t>(e4m3_pair(__fdiv_rn(value, scales[i]), 0.0f));
            } else {
                to = bfloat16(value);
            }
        }
    }
}

// out[out_rows[token], row + ...] = weight * (down h) for a tile. No weights: 1.
template <int KIND, int DEPTH, int WIDTH, int TOKENS>
__device__ __forceinline__ void down(Rows rows, int row, Activations h, const int* h_rows, int tokens, const int* out_rows,
                                     int out_row, const float* weights, uint16_t* out, bool waited) {
    float sums[2][TOKENS / 8][4] = {};
    product<KIND, DEPTH, WIDTH, true, TOKENS>(sums, rows, rows, row, h, h_rows, tokens, waited);
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
            out[static_cast<size_t>(target) * D + row + at] = bfloat16(sum * row_scale<KIND>(rows, at) * weight);
        }
    }
}

struct Tile {
    int expert, first, tokens;
};

// Tile `index` of the routed pairs; expert -1 where there is none.
__device__ __forceinline__ Tile routed(const int4* tiles, int index) {
    const int4 tile = tiles[index];
    return {tile.x, tile.y, tile.z};
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

// x       [T, D] bfloat16, or codes and their scales for fp8; shared_x the same for the shared expert
// tiles   with order what moe_plan made of the routing, for tiles of TILE
// h       [pairs in order, F]: what enters the experts' down; shared_h [T, SHARED_F] the shared expert's
// grid    the shared expert's tiles times its blocks of 16 ROW_WARPS rows, then all tiles times the experts'
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
moe_few_gate_up(const char* x, const float* x_scales, const int4* tiles, const int* order, const void* gate,
                const void* gate_scales, const void* up, const void* up_scales, Hidden<EXPERT_KIND>* h, float* h_scales,
                const char* shared_x, const float* shared_x_scales, const void* shared_gate, const void* shared_gate_scales,
                const void* shared_up, const void* shared_up_scales, Hidden<SHARED_KIND>* shared_h, float* shared_h_scales,
                int num_tokens) {
    __shared__ int x_rows[TILE];
    After predecessor;
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
                rows_of<SHARED_KIND, SHARED_F, D>(shared_up, shared_up_scales, 0, row), row,
                {shared_x, shared_x_scales, num_tokens}, x_rows, tokens, first, shared_h, shared_h_scales, num_tokens, false);
        });
        return;
    }
    block -= shared_blocks;
#endif
    wait_for_predecessor();
    const Tile tile = routed(tiles, block / (F / ROWS));
    if (tile.expert < 0) return;
    const int row = block % (F / ROWS) * ROWS;
    if (threadIdx.x < tile.tokens) {
        x_rows[threadIdx.x] = order[tile.first + threadIdx.x] / TOP_K;
    }
    __syncthreads();
    with_tokens(tile.tokens, [&](auto most) {
        gate_up<EXPERT_KIND, EXPERT_UE8M0, EXPERT_DEPTH, F, most>(
            rows_of<EXPERT_KIND, F, D>(gate, gate_scales, tile.expert, row),
            rows_of<EXPERT_KIND, F, D>(up, up_scales, tile.expert, row), row, {x, x_scales, num_tokens}, x_rows, tile.tokens,
            tile.first, h, h_scales, num_tokens * TOP_K, true);
    });
}

// weights [T, TOP_K]
// out     [T * TOP_K + T, D] bfloat16: weighted rows of the pairs, then those of the shared expert
// grid    the shared expert's tiles times D's blocks of 32 ROW_WARPS rows, then all tiles times as many
// What is read before the wait was made before the predecessor, which waited for it before this could start.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
moe_few_down(const char* h, const float* h_scales, const int4* tiles, const int* order, const float* weights,
             const void* down_rows, const void* down_scales, uint16_t* out, const char* shared_h, const float* shared_h_scales,
             const void* shared_down, const void* shared_down_scales, int num_tokens) {
    __shared__ int h_rows[TILE];
    After predecessor;
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
            down<SHARED_KIND, SHARED_DEPTH, SHARED_F, most>(
                rows_of<SHARED_KIND, D, SHARED_F>(shared_down, shared_down_scales, 0, row), row,
                {shared_h, shared_h_scales, num_tokens}, h_rows, tokens, nullptr, num_tokens * TOP_K + first, nullptr, out, false);
        });
        return;
    }
    block -= shared_blocks;
#endif
    const Tile tile = routed(tiles, block / (D / ROWS));
    if (tile.expert < 0) return wait_for_predecessor();
    const int row = block % (D / ROWS) * ROWS;
    if (threadIdx.x < TILE) h_rows[threadIdx.x] = tile.first + threadIdx.x;
    __syncthreads();
    with_tokens(tile.tokens, [&](auto most) {
        down<EXPERT_KIND, EXPERT_DEPTH, F, most>(
            rows_of<EXPERT_KIND, D, F>(down_rows, down_scales, tile.expert, row), row, {h, h_scales, num_tokens * TOP_K}, h_rows,
            tile.tokens, order + tile.first, 0, weights, out, false);
    });
}
