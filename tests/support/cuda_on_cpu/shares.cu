// What every thread block of one_token.cu takes: a kernel around plugins/moe/shares.cuh.
#include "../../../plugins/moe/shares.cuh"

// ids    [TOP_K]
// takers [first + TOP_K * each]: how many blocks take a row of the shared expert, then of each pair
// costs  [blocks]: of a block's items
extern "C" __global__ void shares(const int* ids, int first, int each, int* takers, int* costs) {
    const unsigned pairs = SPREAD ? pairs_of(ids) : 0;
    const Items items = items_of(first, each, SPREAD ? __popc(pairs) : TOP_K);
    costs[blockIdx.x] = 0;
    for (int index = items.begin; index < items.end; ++index) {
        const Item item = item_at(index, first, each, pairs);
        takers[item.shared ? item.row : first + item.pair * each + item.row] += 1;
        costs[blockIdx.x] += item.shared ? SHARED_COST : 1;
    }
}
