// Experts of a single token: each weight is read once, and every multiprocessor reads an equal share of them.
//
// The shared expert, then each of the token's experts, in items of 8 rows of gate and of up (moe_one_gate_up), or 32 of down
// (moe_one_down). A thread block, alone on its multiprocessor, has consecutive items, a warp one of them at a time, whole rows;
// an item of the shared expert counts SHARED_COST. The activations are put down once, all of a row, fp8 quantized on the way,
// so that no barrier follows. How weights and activations meet: experts.cuh; all eight tokens of a product are the same one.
//
// Defines: GATE_UP, or down; EXPERT_KIND, EXPERT_UE8M0, EXPERT_DEPTH of a warp's ring; SHARED_KIND (-1: no shared expert), SHARED_UE8M0,
// SHARED_DEPTH, SHARED_COST; D, F, SHARED_F (0 without); TOP_K; WARPS; RING, SCALES: bytes of a warp's; PUT_ROWS of
// activations that the items of a block can need; PDL; SPREAD: most pairs have no expert here, so that only those that have are
// shared out.

#include "experts.cuh"
#include "shares.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr bool SHARED = SHARED_KIND >= 0;
// Kind and so on of the shared expert where it is there, else anything that compiles.
constexpr int BESIDE_KIND = SHARED ? SHARED_KIND : EXPERT_KIND, BESIDE_F = SHARED ? SHARED_F : F;
constexpr int BESIDE_DEPTH = SHARED ? SHARED_DEPTH : EXPERT_DEPTH;

extern __shared__ uint4 shared[];

// What enters down: bfloat16, or float32 where it is quantized next, so that it is rounded once.
template <int KIND> using Hidden = std::conditional_t<KIND == FP8, float, uint16_t>;

__device__ __forceinline__ void wait_for_predecessor() {
#if PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// M sides of 16 rows times one token: a warp's item on its way through the ring. M is 1 where `second` is another matrix.
template <int KIND, int DEPTH, int K, int M> struct Stream {
    static constexpr int BLOCKS = K / 128, COPIES = PIECES<KIND>, BYTES = 64 * COPIES, PITCH = BLOCKS * BYTES;
    static_assert(DEPTH * M * 2 * COPIES * 512 <= RING);
    const char* from[M][2];
    uint4* ring;
    char* scales;

    // Of the rows from `first` and, if M is 1, from `second` on.
    __device__ __forceinline__ Stream(char* of_warp, Rows first, Rows second)
        : ring(reinterpret_cast<uint4*>(of_warp) + threadIdx.x % 32), scales(of_warp + RING) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            from[m][0] = first.data + (16 * m + g) * PITCH + 16 * t;
            from[m][1] = M == 1 ? second.data + g * PITCH + 16 * t : from[m][0] + 8 * PITCH;
        }
    }

    __device__ __forceinline__ void fetch(int block, int slot) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int i = 0; i < COPIES; ++i) {
                    copy16(ring + (slot * 2 * M * COPIES + (m * 2 + h) * COPIES + i) * 32, from[m][h] + block * BYTES + 64 * i);
                }
            }
        }
    }

    // Starts to read.
    __device__ __forceinline__ void begin(Rows first, Rows second) {
        const int lane = threadIdx.x % 32;
        if constexpr (KIND == WINT4) {
            constexpr int PART = (M == 1 ? 8 : 16 * M) * BLOCKS * 2;
            static_assert((M == 1 ? 2 : 1) * PART <= SCALES);
            for (int i = lane * 16; i < PART; i += 512) copy16(scales + i, first.scales + i);
            if (M == 1) {
                for (int i = lane * 16; i < PART; i += 512) copy16(scales + PART + i, second.scales + i);
            }
        } else if constexpr (KIND == FP8) {
            static_assert((M == 1 ? 2 : 1) * BLOCKS * 4 <= SCALES);
            for (int i = lane; i < BLOCKS; i += 32) copy4(scales + 4 * i, first.scales + 4 * i);
            if (M == 1) {
                for (int i = lane; i < BLOCKS; i += 32) copy4(scales + 4 * (BLOCKS + i), second.scales + 4 * i);
            }
        }
        for (int i = 0; i < DEPTH; ++i) {
            if (i < BLOCKS) fetch(i, i);
            commit();
        }
    }

    // sums[m][c] as in the mma's layout. xs: the row put down; x_scales: of its blocks, for fp8.
    __device__ __forceinline__ void run(float (&sums)[M][4], const char* xs, const float* x_scales) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        for (int i = 0, slot = 0; i < BLOCKS; ++i) {
            wait_for_copies<DEPTH - 1>();
            if (i == 0) __syncwarp();  // the scales, which other lanes copied
            uint4 weights[M][2][COPIES];
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int p = 0; p < COPIES; ++p)
                        weights[m][h][p] = ring[(slot * 2 * M * COPIES + (m * 2 + h) * COPIES + p) * 32];
            constexpr bool SCALED = KIND == WINT4 || KIND == FP8;
            float part[M][4] = {};
            auto& into = *(SCALED ? &part : &sums);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const uint4 x8 = *reinterpret_cast<const uint4*>(xs + i * 256 + q * 64 + t * 16);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    uint32_t upper[4], lower[4];
                    decode<KIND>(upper, reinterpret_cast<const uint32_t*>(weights[m][0]), q);
                    decode<KIND>(lower, reinterpret_cast<const uint32_t*>(weights[m][1]), q);
                    const uint32_t a[2][4] = {{upper[0], lower[0], upper[1], lower[1]}, {upper[2], lower[2], upper[3], lower[3]}};
                    multiply<KIND>(into[m], a[0], x8.x, x8.y);
                    multiply<KIND>(into[m], a[1], x8.z, x8.w);
                }
            }
#pragma unroll
            for (int m = 0; m < M; ++m) {
                if constexpr (KIND == WINT4) {
                    const uint16_t* at = reinterpret_cast<const uint16_t*>(scales) + (16 * m + g) * BLOCKS + i;
                    const float above = low(at[0]), below = low(at[8 * BLOCKS]);
#pragma unroll
                    for (int c = 0; c < 4; ++c) sums[m][c] += part[m][c] * (c < 2 ? above : below);
                } else if constexpr (KIND == FP8) {
                    const float* at = reinterpret_cast<const float*>(scales) + i;
                    const float above = at[0] * x_scales[i], below = (M == 1 ? at[BLOCKS] : at[0]) * x_scales[i];
#pragma unroll
                    for (int c = 0; c < 4; ++c) sums[m][c] += part[m][c] * (c < 2 ? above : below);
                }
            }
            if (i + DEPTH < BLOCKS) fetch(i + DEPTH, slot);
            commit();
            if (++slot == DEPTH) slot = 0;
        }
        wait_for_copies<0>();
        __syncwarp();  // the scales' place is free
    }
};

// Puts down a row of K activations, float32 or bfloat16, as run() reads them; by all threads.
template <int KIND, bool POWERS, int K, class T> __device__ __forceinline__ void put_down(const T* x, char* xs) {
    float* x_scales = reinterpret_cast<float*>(xs + 2 * K);
    for (int unit = threadIdx.x; unit < K / 8; unit += THREADS) {
        float scale = 1;
        uint4 made;
        if constexpr (KIND == FP8) {
            float values[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if constexpr (std::is_same_v<T, float>) values[i] = x[8 * unit + i];
                else values[i] = low(x[8 * unit + i]);
            }
            made = quantize<POWERS>(values, scale);
            if (unit % 16 == 0) x_scales[unit / 16] = scale;
        } else {
            made = *reinterpret_cast<const uint4*>(x + 8 * unit);
            if constexpr (KIND == WINT4) made = as_nibbles(made);
        }
        *reinterpret_cast<uint4*>(xs + unit / 16 * 256 + place<KIND>(unit % 16) * 16) = made;
    }
}

// Bytes of a row put down and of the scales after it.
template <int COLUMNS> constexpr int ROW_BYTES = 2 * COLUMNS + (COLUMNS / 128 * 4 + 15) / 16 * 16;

#if GATE_UP

// h[row] = silu(gate) * up for the eight rows of an item.
template <int KIND, int DEPTH, int WIDTH> struct GateUp {
    Stream<KIND, DEPTH, D, 1> stream;
    Rows gate, up;
    Hidden<KIND>* h;

    __device__ __forceinline__ GateUp(char* of_warp, Rows gate, Rows up, Hidden<KIND>* h)
        : stream(of_warp, gate, up), gate(gate), up(up), h(h) {}

    __device__ __forceinline__ void begin() { stream.begin(gate, up); }

    __device__ __forceinline__ void finish(const char* xs) {
        float sums[1][4] = {};
        stream.run(sums, xs, reinterpret_cast<const float*>(xs + 2 * D));
        const int lane = threadIdx.x % 32;
        if (lane % 4) return;
        const float a = sums[0][0] * row_scale<KIND>(gate, lane / 4), b = sums[0][2] * row_scale<KIND>(up, lane / 4);
        const float value = a / (1.0f + __expf(-a)) * b;
        if constexpr (KIND == FP8) {
            h[lane / 4] = value;
        } else {
            h[lane / 4] = bfloat16(value);
        }
    }
};

// x       [D] bfloat16; ids [TOP_K]
// h       [TOP_K, F] and shared_h [SHARED_F]: what enters down
extern "C" __global__ void __launch_bounds__(THREADS, 1)
moe_one_gate_up(const uint16_t* x, const int* ids, const void* gate, const void* gate_scales, const void* up,
                const void* up_scales, Hidden<EXPERT_KIND>* h, const void* shared_gate, const void* shared_gate_scales,
                const void* shared_up, const void* shared_up_scales, Hidden<BESIDE_KIND>* shared_h) {
    constexpr int FIRST = SHARED ? BESIDE_F / 8 : 0, EACH = F / 8;
    constexpr bool ALIKE = !SHARED || (SHARED_KIND == EXPERT_KIND && SHARED_UE8M0 == EXPERT_UE8M0);
    char* xs = reinterpret_cast<char*>(shared);
    char* beside_xs = ALIKE ? xs : xs + ROW_BYTES<D>;
    char* of_warp = beside_xs + ROW_BYTES<D> + threadIdx.x / 32 * (RING + SCALES);
#if SPREAD
    wait_for_predecessor();
    const unsigned pairs = pairs_of(ids);
    const Items items = items_of(FIRST, EACH, __popc(pairs));
#else
    constexpr unsigned pairs = 0;
    const Items items = items_of(FIRST, EACH, TOP_K);
#endif
    auto with_item = [&](int index, auto use) {
        const Item item = item_at(index, FIRST, EACH, pairs);
        const int row = 8 * item.row;
        if (SHARED && item.shared) {
            GateUp<BESIDE_KIND, BESIDE_DEPTH, BESIDE_F> work(
                of_warp, rows_of<BESIDE_KIND, BESIDE_F, D>(shared_gate, shared_gate_scales, 0, row),
                rows_of<BESIDE_KIND, BESIDE_F, D>(shared_up, shared_up_scales, 0, row), shared_h + row);
            return use(work, beside_xs);
        }
        const int expert = ids[item.pair];
        if (expert < 0) return;
        GateUp<EXPERT_KIND, EXPERT_DEPTH, F> work(of_warp, rows_of<EXPERT_KIND, F, D>(gate, gate_scales, expert, row),
                                                  rows_of<EXPERT_KIND, F, D>(up, up_scales, expert, row), h + item.pair * F + row);
        use(work, xs);
    };
    const int mine = items.begin + threadIdx.x / 32;
    const bool early = !SPREAD && mine < FIRST;  // its weights are known before the predecessor's results
    if (!SPREAD && !early) wait_for_predecessor();
    if (mine < items.end) with_item(mine, [](auto& work, const char*) { work.begin(); });
    if (early) wait_for_predecessor();
    put_down<EXPERT_KIND, EXPERT_UE8M0, D>(x, xs);
    if (!ALIKE) put_down<BESIDE_KIND, SHARED_UE8M0, D>(x, beside_xs);
    __syncthreads();
    for (int index = mine; index < items.end; index += WARPS) {
        with_item(index, [&](auto& work, const char* put) {
            if (index != mine) work.begin();
            work.finish(put);
        });
    }
}

#else

// out[row] = weight * (down h) for the 32 rows of an item.
template <int KIND, int DEPTH, int K> struct Down {
    Stream<KIND, DEPTH, K, 2> stream;
    Rows rows;
    float weight;
    uint16_t* out;

    __device__ __forceinline__ Down(char* of_warp, Rows rows, float weight, uint16_t* out)
        : stream(of_warp, rows, rows), rows(rows), weight(weight), out(out) {}

    __device__ __forceinline__ void begin() { stream.begin(rows, rows); }

    __device__ __forceinline__ void finish(const char* hs) {
        float sums[2][4] = {};
        stream.run(sums, hs, reinterpret_cast<const float*>(hs + 2 * K));
        const int lane = threadIdx.x % 32;
        if (lane % 4) return;
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int row = part * 8 + lane / 4;
            out[row] = bfloat16(sums[part / 2][part % 2 * 2] * row_scale<KIND>(rows, row) * weight);
        }
    }
};

// weights [TOP_K]
// out     [TOP_K + 1, D] bfloat16: weighted rows of the experts, then that of the shared one
// What is read before the wait was made before the predecessor, which waited for it before this could start.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
moe_one_down(const Hidden<EXPERT_KIND>* h, const int* ids, const float* weights, const void* down, const void* down_scales,
             uint16_t* out, const Hidden<BESIDE_KIND>* shared_h, const void* shared_down, const void* shared_down_scales) {
    constexpr int EACH = D / 32, FIRST = SHARED ? EACH : 0, ROW = ROW_BYTES<(F > BESIDE_F ? F : BESIDE_F)>;
    char* hs = reinterpret_cast<char*>(shared);
    char* of_warp = hs + PUT_ROWS * ROW + threadIdx.x / 32 * (RING + SCALES);
#if SPREAD
    const unsigned pairs = pairs_of(ids);
    const Items items = items_of(FIRST, EACH, __popc(pairs));
#else
    constexpr unsigned pairs = 0;
    const Items items = items_of(FIRST, EACH, TOP_K);
#endif
    const int source = items.begin / EACH;  // of the first row put down: the shared expert, then the pairs
    auto with_item = [&](int index, auto use) {
        const Item item = item_at(index, FIRST, EACH, pairs);
        const int row = 32 * item.row;
        if (SHARED && item.shared) {
            Down<BESIDE_KIND, BESIDE_DEPTH, BESIDE_F> work(
                of_warp, rows_of<BESIDE_KIND, D, BESIDE_F>(shared_down, shared_down_scales, 0, row), 1.0f, out + TOP_K * D + row);
            return use(work);
        }
        const int expert = ids[item.pair];
        if (expert < 0) return;
        Down<EXPERT_KIND, EXPERT_DEPTH, F> work(
            of_warp, rows_of<EXPERT_KIND, D, F>(down, down_scales, expert, row), weights[item.pair], out + item.pair * D + row);
        use(work);
    };
    const int mine = items.begin + threadIdx.x / 32;
    if (mine < items.end) with_item(mine, [](auto& work) { work.begin(); });
    wait_for_predecessor();
    for (int i = 0; i < PUT_ROWS && (source + i) * EACH < items.end; ++i) {
        const int routed = source + i - SHARED;
        if (routed < 0) {
            put_down<BESIDE_KIND, SHARED_UE8M0, BESIDE_F>(shared_h, hs + i * ROW);
        } else {
            put_down<EXPERT_KIND, EXPERT_UE8M0, F>(h + nth(pairs, routed) * F, hs + i * ROW);
        }
    }
    __syncthreads();
    for (int index = mine; index < items.end; index += WARPS) {
        const char* put = hs + (index / EACH - source) * ROW;
        with_item(index, [&](auto& work) {
            if (index != mine) work.begin();
            work.finish(put);
        });
    }
}

#endif
