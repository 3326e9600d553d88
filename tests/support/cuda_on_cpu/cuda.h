// As much of CUDA C++ as lets a kernel's file be compiled for a CPU: threads of a block take turns, each until it waits.
//
// Blocks run one after the other. Threads of a warp that meet in a collective must all be there.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __launch_bounds__(...)
#define __forceinline__ inline

using std::max;
using std::min;

struct Index { int x; };
inline Index threadIdx, blockIdx, gridDim;
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
uint4 memory[1 << 16];

struct Meeting { int arrived = 0, round = 0; };
struct Fiber { ucontext_t context; std::vector<char> stack; bool done = false; };
inline std::vector<Fiber> fibers;
inline std::vector<Meeting> meetings;  // of each warp, and of the block
inline std::vector<uint64_t> said;     // by each thread to its warp
inline ucontext_t scheduler;
inline std::function<void()> body;

inline void meet(Meeting& meeting, int threads) {
    const int round = meeting.round;
    if (++meeting.arrived == threads) {
        meeting.arrived = 0;
        ++meeting.round;
        return;
    }
    while (meeting.round == round) swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

inline void __syncwarp() { meet(meetings[threadIdx.x / 32], 32); }
inline void __syncthreads() { meet(meetings.back(), static_cast<int>(fibers.size())); }

template <class T> T from_lane(T value, int lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "more than a word");
    memcpy(&said[threadIdx.x], &value, sizeof(T));
    __syncwarp();
    T found;
    memcpy(&found, &said[threadIdx.x / 32 * 32 + lane], sizeof(T));
    __syncwarp();
    return found;
}

template <class T> T __shfl_sync(unsigned, T value, int lane) { return from_lane(value, lane); }
template <class T> T __shfl_xor_sync(unsigned, T value, int step) { return from_lane(value, threadIdx.x % 32 ^ step); }

template <class T> T __shfl_up_sync(unsigned, T value, int step) {
    const int lane = threadIdx.x % 32;
    return from_lane(value, lane < step ? lane : lane - step);
}

inline unsigned __match_any_sync(unsigned, int value) {
    unsigned same = 0;
    for (int lane = 0; lane < 32; ++lane) same |= static_cast<unsigned>(from_lane(value, lane) == value) << lane;
    return same;
}

inline unsigned __ballot_sync(unsigned, bool vote) {
    said[threadIdx.x] = vote;
    __syncwarp();
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(said[threadIdx.x / 32 * 32 + lane]) << lane;
    __syncwarp();
    return votes;
}

template <class T> T atomicAdd(T* to, T value) { return (*to += value) - value; }
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __clz(unsigned word) { return word == 0 ? 32 : __builtin_clz(word); }
inline int __ffs(unsigned word) { return __builtin_ffs(static_cast<int>(word)); }
inline int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
inline float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }

inline void enter() {
    body();
    fibers[threadIdx.x].done = true;
}

// Runs `kernel` as blocks of `threads`. Memory shared by a block is full of what was there before.
inline void launch(int blocks, int threads, const std::function<void()>& kernel) {
    body = kernel;
    gridDim.x = blocks;
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        memset(memory, 0xA5, sizeof(memory));
        fibers = std::vector<Fiber>(threads);
        meetings.assign(threads / 32 + 1, Meeting());
        said.assign(threads, 0);
        for (int i = 0; i < threads; ++i) {
            getcontext(&fibers[i].context);
            fibers[i].stack.resize(1 << 17);
            fibers[i].context.uc_stack.ss_sp = fibers[i].stack.data();
            fibers[i].context.uc_stack.ss_size = fibers[i].stack.size();
            fibers[i].context.uc_link = &scheduler;
            makecontext(&fibers[i].context, enter, 0);
        }
        for (int left = threads; left > 0;) {
            left = 0;
            for (int i = 0; i < threads; ++i) {
                if (fibers[i].done) continue;
                threadIdx.x = i;
                swapcontext(&scheduler, &fibers[i].context);
                left += !fibers[i].done;
            }
        }
    }
}
