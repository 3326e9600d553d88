// How one_token.cu shares out its work: items of the shared expert, then of the pairs, consecutive ones to a thread block.
//
// Defines as there: TOP_K, SHARED_COST, SPREAD.
#pragma once

struct Item {
    bool shared;
    int pair, row;  // of the routed ones; in units of items
};

struct Items {
    int begin, end;
};

// The pairs that are shared out: bit k is the k-th.
__device__ __forceinline__ unsigned pairs_of(const int* ids) {
    static_assert(TOP_K <= 32);
    unsigned pairs = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) pairs |= static_cast<unsigned>(ids[k] >= 0) << k;
    return pairs;
}

// The n-th pair of those.
__device__ __forceinline__ int nth(unsigned pairs, int n) {
#if SPREAD
    while (n--) pairs &= pairs - 1;
    return __ffs(pairs) - 1;
#else
    return n;
#endif
}

// The items of this block, where the shared expert has `first` of them and each of `count` other ones `each`.
__device__ __forceinline__ Items items_of(int first, int each, int count) {
    const int units = first * SHARED_COST + count * each;
    auto item = [&](int block) {
        const int unit = static_cast<int>(static_cast<long long>(block) * units / static_cast<int>(gridDim.x));
        const int of_shared = first * SHARED_COST;
        return unit < of_shared ? (unit + SHARED_COST - 1) / SHARED_COST : unit - of_shared + first;
    };
    return {item(blockIdx.x), item(blockIdx.x + 1)};
}

__device__ __forceinline__ Item item_at(int index, int first, int each, unsigned pairs) {
    return index < first ? Item{true, 0, index} : Item{false, nth(pairs, (index - first) / each), (index - first) % each};
}
