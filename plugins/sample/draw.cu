// The tokens of the rows that are not greedy, a block a row.
//
// Probabilities are whole numbers, round(2^44 e^((logit - largest) / temperature)), so that their sums are the same in any order.
// A row is read once: tokens near enough to its largest to weigh anything are packed, 32 a warp, and their masses and numbers
// summed by buckets of distance; those of the first buckets are held. A search (top_k, top_p, the draw) takes the bucket in which
// its sum exceeds its goal and splits it by key, reading what is held or else the row again, until few tokens are left, which are
// compared with each other. Keys are logits as integers that compare as they do; of equal ones the lower index comes first.
//
// Defines: V, W (words of a mask row), S (parts of a row that sample_scan took), THREADS, ROOM (tokens held), FEW (tokens
// compared with each other), SHARED_BYTES, PDL.

#include <cuda_pipeline.h>

constexpr int WARPS = THREADS / 32, VECTOR = V % 4 == 0 ? 4 : 1, DEPTH = 3;
constexpr int STEPS = (V + THREADS * VECTOR - 1) / (THREADS * VECTOR), PACKED = 32 * (VECTOR + 1);
constexpr int BUCKETS = 11, HELD_BUCKETS = 8, SPLIT_BITS = 3;
constexpr int NUMBER_BITS = 10;  // of a thread's sum, its mass above them
constexpr float FAR = 32.0f, MOST = 3.402823466e+38f;  // e^-32 < 2^-45: further below, in temperatures, nothing has weight
constexpr double ONE = 17592186044416.0;
constexpr unsigned ALL = ~0u;

static_assert(FEW <= ROOM && FEW <= THREADS && WARPS >= 2, "too few threads");
static_assert(VECTOR * (STEPS + 1) < (1 << NUMBER_BITS), "a thread's sum would overflow");

typedef long long Mass;
struct Token { float value; int index; };
struct Few { Token tokens[FEW]; Mass weights[FEW]; };
struct alignas(4 * VECTOR) Values { float at[VECTOR]; };

struct Shared {
    unsigned long long sums[BUCKETS][THREADS];
    Values values[DEPTH][THREADS];
    int words[DEPTH][THREADS];
    Token held[ROOM];
    union { Token packed[WARPS][PACKED]; Few few; };
    Mass masses[2][BUCKETS];  // by bucket of distance, and by piece of what was split last
    int numbers[2][BUCKETS];
    int bounds[BUCKETS];  // the smallest key of each bucket
    int parts[WARPS];
    unsigned long long above;
    Mass mass;
    int token, count;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory");

// Tokens with keys in [low, high), and the sums over those with larger ones.
struct Window { int low, high, count, number; Mass mass; };

__device__ __forceinline__ int key_of(float value) {
    int bits = __float_as_int(value);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

__device__ __forceinline__ float value_of(int key) { return __int_as_float(key ^ ((key >> 31) & 0x7FFFFFFF)); }

// `dsc.plugins.sample.philox.uniform` of one row.
__device__ double uniform(long long seed, int position) {
    unsigned c0 = position, c1 = 0, c2 = 0, c3 = 0, k0 = seed, k1 = seed >> 32;
    for (int i = 0; i < 10; ++i) {
        unsigned long long p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        c0 = static_cast<unsigned>(p1 >> 32) ^ c1 ^ k0;
        c2 = static_cast<unsigned>(p0 >> 32) ^ c3 ^ k1;
        c1 = static_cast<unsigned>(p1);
        c3 = static_cast<unsigned>(p0);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return (c0 >> 8) * (1.0 / (1 << 24));
}

struct Row {
    const float* __restrict__ logits;
    const int* __restrict__ mask;
    Shared& shared;
    float largest, scale, lowest;
    double heat, inverse;
    int thread, lane, warp;
    int held_low, held_high;  // the keys whose tokens are held, all of them

    // e^((value - largest) / temperature).
    __device__ __forceinline__ double ratio(float value) const {
        float below = value - largest;
        if (below < -MOST) return 0.0;
        // The quotient correctly rounded: no quotient of two floats is near the middle of two doubles.
        const double distance = below;
        const double quotient = distance * inverse;
        return exp(fma(fma(-quotient, heat, distance), inverse, quotient));
    }

    __device__ __forceinline__ Mass weight(float value) const { return static_cast<Mass>(ratio(value) * ONE + 0.5); }

    // Grows with the distance below the largest: bounds at 0.5, 1, 2, 3, 5, 7, 11, 15, 23 and 31 temperatures.
    __device__ __forceinline__ int bucket(float value) const {
        int bits = __float_as_int(fmaf(largest - value, scale, 1.0f));
        return min(max((bits >> 22) - (127 << 1), 0), BUCKETS - 1);
    }

    // The smallest key of bucket `b` or one before it.
    __device__ int bound(int b) const {
        unsigned low = key_of(lowest), high = key_of(largest);
        while (low != high) {
            unsigned middle = low + (high - low) / 2;
            if (bucket(value_of(middle)) <= b) high = middle; else low = middle + 1;
        }
        return low;
    }

    // take(token, real) by whole warps, for every allowed token with a value of at least `least`, and some that are not real.
    template <class Take>
    __device__ __forceinline__ void read(float least, Take take) {
        Token* packed = shared.packed[warp];
        int count = 0;
        // Every thread waits for its own copies alone.
        auto load = [&](int step) {
            const int at = (step * THREADS + thread) * VECTOR;
            if (at < V) {
                __pipeline_memcpy_async(&shared.values[step % DEPTH][thread], logits + at, sizeof(Values));
                __pipeline_memcpy_async(&shared.words[step % DEPTH][thread], mask + at / 32, sizeof(int));
            }
            __pipeline_commit();
        };
        for (int step = 0; step < DEPTH - 1; ++step) load(step);
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            load(step + DEPTH - 1);
            __pipeline_wait_prior(DEPTH - 1);
            const int at = (step * THREADS + thread) * VECTOR;
            const Values values = shared.values[step % DEPTH][thread];
            const unsigned allowed = at < V ? static_cast<unsigned>(shared.words[step % DEPTH][thread]) >> (at % 32) : 0;
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float value = values.at[i];
                const bool wanted = (allowed >> i & 1) && value >= least;
                const unsigned who = __ballot_sync(ALL, wanted);
                if (wanted) packed[count + __popc(who & ((1u << lane) - 1))] = {value == 0.0f ? 0.0f : value, at + i};
                count += __popc(who);
            }
            if (count < 32) continue;
            __syncwarp();
            int done = 0;
#pragma unroll 1
            for (; count - done >= 32; done += 32) take(packed[done + lane], true);
            count -= done;
            const Token rest = packed[lane < count ? done + lane : 0];
            __syncwarp();
            packed[lane] = rest;
            __syncwarp();
        }
        __syncwarp();
        if (count > 0) take(packed[lane < count ? lane : 0], lane < count);
        __syncthreads();
    }

    // One more token among the held ones, by whole warps; shared.count counts also those without room.
    __device__ __forceinline__ void keep(Token token, bool wanted) {
        unsigned who = __ballot_sync(ALL, wanted);
        if (who == 0) return;
        int first = 0;
        if (lane == 0) first = atomicAdd(&shared.count, __popc(who));
        int at = __shfl_sync(ALL, first, 0) + __popc(who & ((1u << lane) - 1));
        if (wanted && at < ROOM) shared.held[at] = token;
    }

    __device__ void clear() {
        for (int b = 0; b < BUCKETS; ++b) shared.sums[b][thread] = 0;
    }

    __device__ __forceinline__ void add(int bucket, Mass weight) {
        shared.sums[bucket][thread] += (static_cast<unsigned long long>(weight) << NUMBER_BITS) + 1;
    }

    __device__ void total(int level) {
        __syncthreads();
        for (int b = warp; b < BUCKETS; b += WARPS) {
            Mass mass = 0;
            int number = 0;
            for (int i = lane; i < THREADS; i += 32) {
                unsigned long long sum = shared.sums[b][i];
                mass += sum >> NUMBER_BITS;
                number += sum & ((1 << NUMBER_BITS) - 1);
            }
            for (int step = 16; step > 0; step /= 2) {
                mass += __shfl_xor_sync(ALL, mass, step);
                number += __shfl_xor_sync(ALL, number, step);
            }
            if (lane == 0) {
                shared.masses[level][b] = mass;
                shared.numbers[level][b] = number;
            }
        }
        __syncthreads();
    }

    // The bucket in which the sum exceeds the goal; the window's sums go up to it.
    __device__ int choose(int level, Mass goal, bool by_count, Window& window) const {
        int b = 0;
        for (; b < BUCKETS - 1; ++b) {
            Mass mass = window.mass + shared.masses[level][b];
            int number = window.number + shared.numbers[level][b];
            if ((by_count ? number : mass) > goal) break;
            window.mass = mass;
            window.number = number;
        }
        window.count = shared.numbers[level][b];
        return b;
    }

    __device__ bool holds(const Window& window) const { return held_low <= window.low && window.high <= held_high; }

    __device__ void hold(const Window& window) {
        if (thread == 0) shared.count = 0;
        __syncthreads();
        read(value_of(window.low), [&](Token token, bool real) { keep(token, real && key_of(token.value) < window.high); });
        held_low = window.low;
        held_high = window.high;
    }

    __device__ void split(Window& window, Mass goal, bool by_count, int held) {
        const unsigned low = window.low, span = static_cast<unsigned>(window.high) - low;
        const int shift = max(32 - __clz(span - 1) - SPLIT_BITS, 0);
        auto take = [&](Token token, bool real) {
            int key = key_of(token.value);
            if (real && key >= window.low && key < window.high) {
                add((1 << SPLIT_BITS) - 1 - ((static_cast<unsigned>(key) - low) >> shift), weight(token.value));
            }
        };
        clear();
        if (holds(window)) {
            for (int i = thread; i < held; i += THREADS) take(shared.held[i], true);
        } else {
            read(value_of(window.low), take);
        }
        total(1);
        const unsigned piece = (1 << SPLIT_BITS) - 1 - choose(1, goal, by_count, window);
        window.low = low + (piece << shift);
        window.high = low + min(span, (piece + 1) << shift);
    }

    // The token of a window of few, held ones at which the sum exceeds the goal, and the mass up to it.
    __device__ void settle(const Window& window, Mass goal, bool by_count, int held) {
        if (thread == 0) shared.count = 0;
        __syncthreads();
        for (int i = thread; i < held; i += THREADS) {
            Token token = shared.held[i];
            int key = key_of(token.value);
            if (key >= window.low && key < window.high) {
                int at = atomicAdd(&shared.count, 1);
                shared.few.tokens[at] = token;
                shared.few.weights[at] = weight(token.value);
            }
        }
        __syncthreads();
        if (thread < window.count) {
            const Token own = shared.few.tokens[thread];
            Mass mass = window.mass;
            int number = window.number;
            for (int i = 0; i < window.count; ++i) {
                Token other = shared.few.tokens[i];
                if (other.value > own.value || (other.value == own.value && other.index < own.index)) {
                    mass += shared.few.weights[i];
                    number += 1;
                }
            }
            const Mass upto = mass + shared.few.weights[thread];
            if (by_count ? number == goal : mass <= goal && upto > goal) {
                shared.mass = upto;
                shared.token = own.index;
            }
        }
        __syncthreads();
    }

    // shared.token = the token number `rank` (from 1) of those with a key.
    __device__ void nth(int key, Mass rank) {
        auto same = [&](int at, int end) {
            bool inside = at < end && (static_cast<unsigned>(mask[at / 32]) >> (at % 32) & 1);
            float value = inside ? logits[at] : 0.0f;
            return __ballot_sync(ALL, inside && key_of(value == 0.0f ? 0.0f : value) == key);
        };
        int begin = 0, end = V;
        while (end - begin > 32) {
            const int part = (end - begin + THREADS - 1) / THREADS * 32, stop = min(end, begin + (warp + 1) * part);
            int number = 0;
            for (int at = begin + warp * part; at < stop; at += 32) number += __popc(same(at + lane, stop));
            if (lane == 0) shared.parts[warp] = number;
            __syncthreads();
            int piece = 0;
            for (; piece < WARPS - 1 && shared.parts[piece] < rank; ++piece) rank -= shared.parts[piece];
            begin = min(end, begin + piece * part);
            end = min(end, begin + part);
            __syncthreads();
        }
        unsigned who = same(begin + lane, end);
        for (; rank > 1; --rank) who &= who - 1;
        if (thread == 0) shared.token = begin + __ffs(who) - 1;
        __syncthreads();
    }

    // The mass up to the first token, by falling logits and then by index, up to which masses or numbers exceed a goal;
    // `token`: also shared.token.
    __device__ Mass search(Mass goal, bool by_count, bool token, int& held) {
        Window window = {0, 0, 0, 0, 0};
        const int b = choose(0, goal, by_count, window);
        window.low = shared.bounds[b];
        window.high = b > 0 ? shared.bounds[b - 1] : key_of(largest) + 1;
        while (window.count > FEW && static_cast<unsigned>(window.high) - static_cast<unsigned>(window.low) > 1) {
            if (window.count <= ROOM && !holds(window)) {
                hold(window);
                held = window.count;
            }
            split(window, goal, by_count, held);
        }
        if (window.count > FEW) {  // all of one key
            const Mass each = weight(value_of(window.low));
            const Mass rank = by_count ? goal + 1 - window.number : (goal - window.mass) / max(each, 1ll) + 1;
            if (token) nth(window.low, rank);
            return window.mass + rank * each;
        }
        if (!holds(window)) {
            hold(window);
            held = window.count;
        }
        settle(window, goal, by_count, held);
        return shared.mass;
    }
};

__device__ __forceinline__ float largest_of(const float* values, int lane) {
    float largest = -INFINITY;
    for (int i = lane; i < S; i += 32) largest = fmaxf(largest, values[i]);
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, step));
    return largest;
}

// floats  [R, 3, S] of sample_scan: by part, the largest logit, what is not used here, the largest allowed logit
// drawn   [R] the token; not written for greedy rows and for those without a finite largest logit
extern "C" __global__ void __launch_bounds__(THREADS, 2)
sample_draw(const float* __restrict__ logits, const int* __restrict__ token_mask, const float* __restrict__ temperature,
            const float* __restrict__ top_p, const int* __restrict__ top_k, const float* __restrict__ min_p,
            const long long* __restrict__ seeds, const int* __restrict__ positions, const float* __restrict__ floats,
            int* __restrict__ drawn) {
    extern __shared__ uint4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
#if PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    const long long at = blockIdx.x;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const float heat = temperature[at];
    if (heat == 0.0f) return;
    const float peak = largest_of(floats + at * 3 * S, lane), largest = largest_of(floats + at * 3 * S + 2 * S, lane);
    if (!(fabsf(peak) <= MOST && fabsf(largest) <= MOST)) return;
    const float lowest = fmaxf(largest - FAR * heat, -MOST);
    Row row = {logits + at * V, token_mask + at * W, shared, largest, 1.0f / heat, lowest, heat, 1.0 / heat, thread, lane,
               warp, 0, 0};
    if (thread == 0) {
        shared.count = 0;
        shared.above = 0;
        shared.mass = 0;
        shared.token = 0;
    }
    row.clear();
    __syncthreads();
    if (warp == WARPS - 1 && lane < BUCKETS) shared.bounds[lane] = row.bound(lane);
    __syncwarp();
    const double least_ratio = min_p[at];
    Mass above = 0;
    row.read(lowest, [&](Token token, bool real) {
        int bucket = row.bucket(token.value);
        if (real) {
            double ratio = row.ratio(token.value);
            Mass weight = static_cast<Mass>(ratio * ONE + 0.5);
            row.add(bucket, weight);
            if (ratio >= least_ratio) above += weight;
        }
        row.keep(token, real && bucket < HELD_BUCKETS);
    });
    for (int step = 16; step > 0; step /= 2) above += __shfl_xor_sync(ALL, above, step);
    if (lane == 0) atomicAdd(&shared.above, static_cast<unsigned long long>(above));
    row.total(0);
    int held = shared.count;
    if (held <= ROOM) {
        row.held_low = shared.bounds[HELD_BUCKETS - 1];
        row.held_high = key_of(largest) + 1;
    }
    above = shared.above;
    Mass kept = 0;
    int number = 0;
    for (int b = 0; b < BUCKETS; ++b) {
        kept += shared.masses[0][b];
        number += shared.numbers[0][b];
    }
    __syncthreads();
    const int most = top_k[at];
    const float share = top_p[at];
#pragma unroll 1
    for (int stage = most > 0 && most < number ? 0 : share < 1.0f ? 1 : 2; stage < 3; ++stage) {
        Mass goal = most - 1;
        if (stage == 1 && !(share < 1.0f)) continue;
        if (stage > 0) {
            if (stage == 2) kept = min(kept, above);
            const double part = stage == 1 ? static_cast<double>(share) : uniform(seeds[at], positions[at]);
            const double wanted = part * static_cast<double>(kept);
            goal = static_cast<Mass>(wanted);
            // top_p asks for a sum of at least so much, the draw for more than so much.
            if (stage == 1 && static_cast<double>(goal) >= wanted) goal = max(goal - 1, 0ll);
        }
        kept = min(kept, row.search(goal, stage == 0, stage == 2, held));
    }
    if (thread == 0) drawn[at] = shared.token;
}
