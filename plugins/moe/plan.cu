// The work list of a Moe: (token, expert) pairs sorted by expert, stably, and tiles of at most TILE pairs of one expert.
//
// One block. Defines: EXPERTS (at most THREADS), TILE, THREADS, PDL; LATE: what the predecessor waited for is all that this
// reads; it waits at its end, so that who waits for this has waited for both.

constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ long long scan_of_warp(long long value, int lane) {
    for (int step = 1; step < 32; step *= 2) {
        long long below = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += below;
    }
    return value;
}

// ids     [pairs] expert of each pair, -1 for none
// order   [pairs] the pairs that have an expert, by expert and then by index
// tiles   [num_tiles] (expert, its first pair in `order`, pairs, 0); expert -1 past the last one
extern "C" __global__ void __launch_bounds__(THREADS, 1)
moe_plan(const int* __restrict__ ids, int* __restrict__ order, int4* __restrict__ tiles, int pairs, int num_tiles) {
    __shared__ int before[WARPS][EXPERTS];  // pairs of an expert in a warp's part, then in the parts before it
    __shared__ int start[EXPERTS];
    __shared__ long long sums[WARPS];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int part = (pairs + WARPS * 32 - 1) / (WARPS * 32) * 32;
    for (int i = thread; i < WARPS * EXPERTS; i += THREADS) before[i / EXPERTS][i % EXPERTS] = 0;
#if PDL && !LATE
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#if PDL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    __syncthreads();
    for (int at = warp * part; at < min(pairs, (warp + 1) * part); at += 32) {
        int expert = at + lane < pairs ? ids[at + lane] : -1;
        unsigned same = __match_any_sync(~0u, expert);
        if (expert >= 0 && lane == __ffs(same) - 1) before[warp][expert] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    int count = 0;
    if (thread < EXPERTS) {
        for (int w = 0; w < WARPS; ++w) {
            int mine = before[w][thread];
            before[w][thread] = count;
            count += mine;
        }
    }
    // Both running sums at once: pairs in the low word, tiles in the high one.
    const int my_tiles = (count + TILE - 1) / TILE;
    const long long mine = (static_cast<long long>(my_tiles) << 32) | count;
    long long sum = scan_of_warp(mine, lane);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    long long total = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w == warp) sum += total;
        total += sums[w];
    }
    const long long ahead = sum - mine;
    const int first = static_cast<int>(ahead), tile = static_cast<int>(ahead >> 32);
    if (thread < EXPERTS) start[thread] = first;
    for (int i = 0; i < my_tiles; ++i) {
        tiles[tile + i] = make_int4(thread, first + i * TILE, min(TILE, count - i * TILE), 0);
    }
    for (int i = static_cast<int>(total >> 32) + thread; i < num_tiles; i += THREADS) tiles[i] = make_int4(-1, 0, 0, 0);
    __syncthreads();
    for (int at = warp * part; at < min(pairs, (warp + 1) * part); at += 32) {
        int expert = at + lane < pairs ? ids[at + lane] : -1;
        unsigned same = __match_any_sync(~0u, expert);
        int rank = __popc(same & ((1u << lane) - 1));
        if (expert >= 0) order[start[expert] + before[warp][expert] + rank] = at + lane;
        __syncwarp();
        if (expert >= 0 && rank == 0) before[warp][expert] += __popc(same);
        __syncwarp();
    }
#if PDL && LATE
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
