// Causal attention of expanded MLA on Hopper: 192 columns of queries and keys, 128 of values, bfloat16. Takes and leaves
// what mla_prefill of triton_prefill.py does: a pass over SPAN tokens of all contexts, merged into what earlier passes left.
//
// The first warpgroup fetches: its first warp takes pieces of work (a head's tile of ROWS queries of a sequence), announces
// them and copies queries, keys and values by TMA; its other warps rotate the rope part of the queries. Each of the other
// warpgroups attends for 64 queries: scores from shared memory, probabilities in registers. Keys are gone through from the
// last to the first, so what is masked comes first. A tile's scores start before the values of the tile before are summed,
// which happens during their softmax; a piece's first scores start before the sums of the piece before are stored.
//
// Defines: HEADS, SPAN, and SHARED_BYTES of the launch.
#include "sm90.cuh"

namespace {

constexpr int NOPE = 128, ROPE = 64, V = 128, UNIT = 64;
constexpr int GROUPS = 3, ROWS = 64 * GROUPS;        // warpgroups that attend; queries of a piece
constexpr int KEYS = 80;                             // of a tile: all that three warpgroups' registers hold
constexpr int STAGES = 2;                            // tiles of keys and of values in shared memory
constexpr int LINE = 128;                            // bytes of a row's 64 columns, in the swizzle of TMA and wgmma
constexpr int CHUNK = 64 * LINE;                     // 64 queries
constexpr int KEY_CHUNK = KEYS * LINE;
constexpr int KEY_BYTES = 3 * KEY_CHUNK;             // two chunks of k_nope, one of k_rope
constexpr int GRANULE = 16;                          // values that a box holds: a part of a tile and of a unit
constexpr int GRANULE_CHUNK = GRANULE * LINE;
constexpr int VALUE_BYTES = 2 * KEYS * LINE;
constexpr int SLOTS = 2;                             // pieces that are announced at a time
constexpr int ROTATORS = 3;                          // warps
constexpr int AT_ONCE = 2;                           // rows that a lane of them has under way
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 152;
constexpr float STALE = 8.0f;                        // the maximum is renewed when a score exceeds it by 2^8
constexpr int TOGETHER = (32 << 20) / (2 * (NOPE + V));  // keys, over the heads that blocks go through together: 32 MiB of L2

struct Piece {
    int head;                                        // -1: no more pieces
    int first_row, stop;                             // queries first_row .. min(first_row + ROWS, stop)
    int seen;                                        // query t sees the keys 0 .. seen + t
    int begin, end;                                  // keys of the pass
    int shift;                                       // of a key's number to its place in the pass
    int limit;                                       // of the pass's keys, those of other sequences begin here
};

struct Shared {
    uint8_t q[GROUPS][2 * CHUNK];
    uint8_t q_rope[SLOTS][GROUPS][CHUNK];
    uint8_t k[STAGES][KEY_BYTES];
    uint8_t v[STAGES][VALUE_BYTES];
    Piece pieces[SLOTS];
    uint64_t piece_full[SLOTS], piece_free[SLOTS], rope_full[SLOTS], q_full[GROUPS], q_free[GROUPS];
    uint64_t k_full[STAGES], k_free[STAGES], v_full[STAGES], v_free[STAGES];
};

static_assert(sizeof(Shared) + 1024 <= SHARED_BYTES, "the launch asks for less");
static_assert(KEYS % GRANULE == 0 && UNIT % GRANULE == 0);

// Where in a ring of stages a warp is.
struct Place {
    int stage = 0, parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

#define OUT4(a, i) "+f"(a[i]), "+f"(a[(i) + 1]), "+f"(a[(i) + 2]), "+f"(a[(i) + 3])
#define OUT8(a, i) OUT4(a, i), OUT4(a, (i) + 4)
#define OUT32(a, i) OUT8(a, i), OUT8(a, (i) + 8), OUT8(a, (i) + 16), OUT8(a, (i) + 24)
#define NAMES32                                                                                                        \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"   \
    "%30,%31"
#define NAMES40 NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define NAMES64 NAMES40                                                                                                \
    ",%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// s [64, KEYS] (+)= a [64, 16] b [KEYS, 16]^T, both in shared memory.
__device__ __forceinline__ void multiply_keys(float (&s)[KEYS / 2], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %42, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" NAMES40 "}, %40, %41, p, 1, 1, 0, 0;\n"
        "}\n"
        : OUT32(s, 0), OUT8(s, 32)
        : "l"(a), "l"(b), "r"(add));
}

// o [64, V] += p [64, 16] b [16, V]: probabilities in registers, values in shared memory.
__device__ __forceinline__ void multiply_values(float (&o)[V / 2], const uint32_t* p, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                 : OUT32(o, 0), OUT32(o, 32)
                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(b));
}

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// What says where contexts and queries are; see the kernel. Found by a whole warp:
// tile, tiles     the first tile of queries of a sequence that the pass holds a part of, and how many there are
// together        heads whose pieces come together
struct Step {
    const int *starts, *lengths, *ends;
    int sequences, first;
    int tile, tiles, together;

    __device__ __forceinline__ Step(const int* starts, const int* lengths, const int* ends, int sequences, int first)
        : starts(starts), lengths(lengths), ends(ends), sequences(sequences), first(first) {
        int before = 0, upto = 0;  // sequences that end before the pass, and that begin before its end
        for (int b = threadIdx.x % 32; b - threadIdx.x % 32 < sequences; b += 32) {
            const bool real = b < sequences;
            before += __popc(__ballot_sync(~0u, real && ends[b] * UNIT <= first));
            upto += __popc(__ballot_sync(~0u, real && (b ? ends[b - 1] : 0) * UNIT < first + SPAN));
        }
        tile = before ? ends[sequences + before - 1] : 0;
        tiles = before < upto ? ends[sequences + upto - 1] - tile : 0;
        together = min(HEADS, max(1, TOGETHER / max(1, min(ends[sequences - 1] * UNIT - first, SPAN))));
    }
};

// The piece with this index, found by a whole warp. Several heads' pieces come together, as many heads as fit the L2, their
// longest first: so blocks share what they read, and the last pieces are short.
__device__ __forceinline__ Piece find_piece(const Step& step, int index) {
    const int lane = threadIdx.x % 32, sequences = step.sequences;
    const int section = index / (step.tiles * step.together), within = index - section * step.tiles * step.together;
    const int heads = min(step.together, HEADS - section * step.together);
    const int tile = step.tile + within / heads;
    int owner = 0;
    for (int b = lane; b - lane < sequences; b += 32)
        owner += __popc(__ballot_sync(~0u, b < sequences && step.ends[sequences + b] <= tile));
    const int start = step.starts[owner], stop = step.starts[owner + 1], length = step.lengths[owner];
    const int context = (step.ends[owner] - (length + UNIT - 1) / UNIT) * UNIT;  // where it begins in the row of contexts
    Piece piece;
    piece.head = section * step.together + within % heads;
    piece.first_row = start + (step.ends[sequences + owner] - 1 - tile) * ROWS;
    piece.stop = stop;
    piece.seen = length - stop + 1;
    piece.shift = context - step.first;
    piece.begin = max(-piece.shift, 0);
    piece.end = min(SPAN - piece.shift, piece.seen - 1 + min(stop, piece.first_row + ROWS));
    piece.limit = min(SPAN - piece.shift, (length + UNIT - 1) / UNIT * UNIT);
    return piece;
}

__device__ __forceinline__ void fetch_values(Shared& shared, const CUtensorMap* values, const Piece& piece, int key,
                                             const Place& at) {
    barrier_wait(&shared.v_free[at.stage], at.parity ^ 1);
    barrier_expect(&shared.v_full[at.stage], VALUE_BYTES);
#pragma unroll
    for (int i = 0; i < KEYS / GRANULE; ++i) {
        // What belongs to others, or to nobody, may be NaN: zeros instead.
        const int row = key + i * GRANULE < piece.limit ? piece.head * SPAN + piece.shift + key + i * GRANULE : HEADS * SPAN;
        fetch(shared.v[at.stage] + i * 2 * GRANULE_CHUNK, values, row, NOPE / 64, &shared.v_full[at.stage]);
    }
}

// The pieces of this block, by the first warp; one lane copies.
__device__ __forceinline__ void produce(Shared& shared, const CUtensorMap* queries, const CUtensorMap* keys,
                                        const CUtensorMap* values, const CUtensorMap* ropes, const Step& step, int* next) {
    const int lane = threadIdx.x % 32, total = step.tiles * HEADS;
    Place k_at, v_at;
    int count = 0, index = blockIdx.x;
    while (index < total) {
        int following = 0;
        if (lane == 0) following = gridDim.x + atomicAdd(next, 1);
        const Piece piece = find_piece(step, index);
        if (piece.begin < piece.end) {
            if (lane == 0) {
                const int slot = count % SLOTS, parity = count / SLOTS & 1;
                barrier_wait(&shared.piece_free[slot], parity ^ 1);
                shared.pieces[slot] = piece;
                barrier_arrive(&shared.piece_full[slot]);
                const int first = (piece.end - piece.begin - 1) / KEYS * KEYS + piece.begin;
                for (int key = first; key >= piece.begin; key -= KEYS) {
                    uint8_t* const to = shared.k[k_at.stage];
                    uint64_t* const full = &shared.k_full[k_at.stage];
                    barrier_wait(&shared.k_free[k_at.stage], k_at.parity ^ 1);
                    barrier_expect(full, KEY_BYTES);
                    fetch(to, keys, piece.head * SPAN + piece.shift + key, 0, full);
                    fetch(to + 2 * KEY_CHUNK, ropes, piece.shift + key, 0, full);
                    k_at.next();
                    if (key == first) {
                        for (int group = 0; group < GROUPS; ++group) {
                            barrier_wait(&shared.q_free[group], count & 1 ^ 1);
                            barrier_expect(&shared.q_full[group], 2 * CHUNK);
                            fetch(shared.q[group], queries, piece.first_row + group * 64, piece.head * 3,
                                  &shared.q_full[group]);
                        }
                    } else {
                        fetch_values(shared, values, piece, key + KEYS, v_at);
                        v_at.next();
                    }
                }
                fetch_values(shared, values, piece, piece.begin, v_at);
                v_at.next();
            }
            __syncwarp();
            ++count;
        }
        index = __shfl_sync(~0u, following, 0);
    }
    if (lane == 0) {
        const int slot = count % SLOTS, parity = count / SLOTS & 1;
        barrier_wait(&shared.piece_free[slot], parity ^ 1);
        shared.pieces[slot].head = -1;
        barrier_arrive(&shared.piece_full[slot]);
        if (atomicAdd(next + 1, 1) == gridDim.x - 1) next[0] = next[1] = 0;  // the last block: clear again
    }
}

__device__ __forceinline__ uint32_t rotate_pair(uint32_t pair, float cosine, float sine) {
    const float even = low_half(pair), odd = high_half(pair);
    return pack_bf16(even * cosine - odd * sine, even * sine + odd * cosine);
}

// The rope part of every piece's queries, turned by their positions. Eight lanes take a row, 16 bytes each.
__device__ __forceinline__ void rotate(Shared& shared, const uint16_t* q, const float* cosines, const float* sines,
                                       const int* positions) {
    const int lane = threadIdx.x % 32, part = lane % 8, begin = (threadIdx.x / 32 - 1) * 4 + lane / 8;
    for (int count = 0;; ++count) {
        const int slot = count % SLOTS;
        barrier_wait(&shared.piece_full[slot], count / SLOTS & 1);
        const int head = shared.pieces[slot].head;
        if (head < 0) break;
        const int first = shared.pieces[slot].first_row, rows = min(shared.pieces[slot].stop - first, ROWS);
#pragma unroll 1
        for (int row = begin; row < ROWS; row += 4 * ROTATORS * AT_ONCE) {
            uint4 x[AT_ONCE];
            float4 c[AT_ONCE], s[AT_ONCE];
            int at[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int local = row + i * 4 * ROTATORS;
                at[i] = local < rows ? positions[first + local] * (ROPE / 2) + part * 4 : 0;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int local = row + i * 4 * ROTATORS;
                x[i] = uint4{0, 0, 0, 0};
                if (local < rows)
                    x[i] = *reinterpret_cast<const uint4*>(
                        q + (static_cast<int64_t>(first + local) * HEADS + head) * (NOPE + ROPE) + NOPE + part * 8);
                c[i] = *reinterpret_cast<const float4*>(cosines + at[i]);
                s[i] = *reinterpret_cast<const float4*>(sines + at[i]);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int local = row + i * 4 * ROTATORS;
                if (local >= ROWS) break;
                const uint4 turned{rotate_pair(x[i].x, c[i].x, s[i].x), rotate_pair(x[i].y, c[i].y, s[i].y),
                                   rotate_pair(x[i].z, c[i].z, s[i].z), rotate_pair(x[i].w, c[i].w, s[i].w)};
                *reinterpret_cast<uint4*>(shared.q_rope[slot][0] + local * LINE + ((part ^ local % 8) << 4)) = turned;
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        warp_arrive(&shared.rope_full[slot]);
    }
}

// What a thread keeps of its two rows.
struct Rows {
    int seen[2], all_see;                            // keys that the rows see, and that every row of the warpgroup does
    float highest[2], total[2];                      // of the scores times scale; of the probabilities
};

// Starts s = queries by the keys of a stage.
__device__ __forceinline__ void start_scores(float (&s)[KEYS / 2], uint32_t q, uint32_t q_rope, uint32_t k) {
    const uint64_t q_at = descriptor(q, 16), rope_at = descriptor(q_rope, 16), k_at = descriptor(k, 16);
#pragma unroll
    for (int step = 0; step < (NOPE + ROPE) / 16; ++step) {
        const uint64_t a = step < 8 ? q_at + (step / 4 * CHUNK + step % 4 * 32) / 16 : rope_at + step % 4 * 32 / 16;
        multiply_keys(s, a, k_at + (step / 4 * KEY_CHUNK + step % 4 * 32) / 16, step > 0);
    }
    wgmma_commit();
}

// Starts o += probabilities by the values of a stage.
__device__ __forceinline__ void start_values(float (&o)[V / 2], const uint32_t (&p)[KEYS / 4], uint32_t v) {
    const uint64_t v_at = descriptor(v, GRANULE_CHUNK);
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
        const int granule = step * 16 / GRANULE, row = step * 16 % GRANULE;
        multiply_values(o, p + 4 * step, v_at + (granule * 2 * GRANULE_CHUNK + row * LINE) / 16);
    }
    wgmma_commit();
}

// From the scores of the keys from `key` on to probabilities in their place; alpha: factors of all that was before.
__device__ __forceinline__ void soften(float (&s)[KEYS / 2], float (&alpha)[2], Rows& rows, int key, float scale) {
    const int column = key + threadIdx.x % 4 * 2;
    if (key + KEYS > rows.all_see) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i)
            if (column + i / 4 * 8 + i % 2 >= rows.seen[i / 2 % 2]) s[i] = -INFINITY;
    }
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most = -INFINITY;
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) most = fmaxf(most, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * scale;
        const float now = most > rows.highest[half] + STALE ? most : rows.highest[half];
        base[half] = now == -INFINITY ? 0.0f : now;
        alpha[half] = exp2_fast(rows.highest[half] - base[half]);
        rows.highest[half] = now;
        rows.total[half] *= alpha[half];
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        s[i] = exp2_fast(fmaf(s[i], scale, -base[i / 2 % 2]));
        rows.total[i / 2 % 2] += s[i];
    }
}

__device__ __forceinline__ void rescale(float (&o)[V / 2], const float (&alpha)[2]) {
    if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < V / 2; ++i) o[i] *= alpha[i / 2 % 2];
    }
}

__device__ __forceinline__ void pack(uint32_t (&p)[KEYS / 4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

// Normalizes a row's sums, merges what earlier passes left, and stores both. Rows at or behind `stop` are not there.
__device__ __forceinline__ void store(float (&o)[V / 2], const Rows& rows, const Piece& piece, int first, uint32_t* to,
                                      float* logs) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int t = first + 8 * half;
        const bool inside = t < piece.stop;
        const int64_t at = static_cast<int64_t>(t) * HEADS + piece.head;
        float sum = rows.total[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        float factor = sum > 0.0f ? 1.0f / sum : 0.0f, log = rows.highest[half] + __log2f(sum);
        if (piece.begin > 0 && inside) {
            const float before = logs[at], most = fmaxf(before, log);
            const float old = exp2_fast(before - most), fresh = exp2_fast(log - most), share = 1.0f / (old + fresh);
            log = most + __log2f(old + fresh);
            factor *= fresh * share;
#pragma unroll
            for (int i = 0; i < V / 8; ++i) {
                const uint32_t earlier = to[at * (V / 2) + i * 4 + threadIdx.x % 4];
                float* const pair = &o[4 * i + 2 * half];
                pair[0] = fmaf(pair[0], factor, low_half(earlier) * (old * share));
                pair[1] = fmaf(pair[1], factor, high_half(earlier) * (old * share));
            }
            factor = 1.0f;
        }
        __syncwarp();  // before earlier sums are overwritten
        if (inside && threadIdx.x % 4 == 0) logs[at] = log;
#pragma unroll
        for (int i = 0; i < V / 32; ++i) {
            uint32_t v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* const pair = &o[(4 * i + j) * 4 + 2 * half];
                v[j] = pack_bf16(pair[0] * factor, pair[1] * factor);
            }
            turn_quad(v);
            if (inside)
                *reinterpret_cast<uint4*>(to + at * (V / 2) + i * 16 + threadIdx.x % 4 * 4) = uint4{v[0], v[1], v[2], v[3]};
        }
    }
}

__device__ __forceinline__ void attend(Shared& shared, int group, float scale, uint32_t* to, float* logs) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const uint32_t q = shared_address(shared.q[group]);
    Place k_at, v_at;
    float s[KEYS / 2], o[V / 2], alpha[2];
    uint32_t p[KEYS / 4];
    int count = 0, slot, first, end, all, own;       // pieces before, then of the present one
    Piece piece;
    const auto look = [&] {
        slot = count % SLOTS;
        barrier_wait(&shared.piece_full[slot], count / SLOTS & 1);
        piece = shared.pieces[slot];
        first = piece.first_row + group * 64;
        end = min(piece.end, piece.seen - 1 + min(piece.stop, first + 64));
        all = (piece.end - piece.begin + KEYS - 1) / KEYS;
        own = first < piece.stop && end > piece.begin ? (end - piece.begin + KEYS - 1) / KEYS : 0;
    };
    const auto await_queries = [&] {
        barrier_wait(&shared.q_full[group], count & 1);
        barrier_wait(&shared.rope_full[slot], count / SLOTS & 1);
    };
    const auto queries_done = [&] {
        warp_arrive(&shared.q_free[group]);
        warp_arrive(&shared.piece_free[slot]);
    };
    const auto await_keys = [&] { barrier_wait(&shared.k_full[k_at.stage], k_at.parity); };
    const auto start_next_scores = [&] {
        wgmma_fence();
        start_scores(s, q, shared_address(shared.q_rope[slot][group]), shared_address(shared.k[k_at.stage]));
    };
    const auto await_values = [&] { barrier_wait(&shared.v_full[v_at.stage], v_at.parity); };
    const auto start_next_values = [&] {
        await_values();
        wgmma_fence();
        start_values(o, p, shared_address(shared.v[v_at.stage]));
    };
    const auto values_done = [&] {
        pin(o);
        warp_arrive(&shared.v_free[v_at.stage]);
        v_at.next();
    };
    look();
    bool started = false;
    while (piece.head >= 0) {
        if (!started) {
            // What no query of this warpgroup sees, others may.
            for (int i = own; i < all; ++i) {
                await_keys();
                warp_arrive(&shared.k_free[k_at.stage]);
                k_at.next();
                await_values();
                warp_arrive(&shared.v_free[v_at.stage]);
                v_at.next();
            }
            await_queries();
            if (own == 0) {
                queries_done();
                ++count;
                look();
                continue;
            }
            await_keys();
            start_next_scores();
            wgmma_wait<0>();
            pin(s);
        }
        Rows rows{{min(piece.seen + first + row, end), min(piece.seen + first + row + 8, end)},
                  min(piece.seen + first, end),
                  {-INFINITY, -INFINITY},
                  {0.0f, 0.0f}};
        int key = piece.begin + (own - 1) * KEYS;
        const auto scores_done = [&] {
            warp_arrive(&shared.k_free[k_at.stage]);
            k_at.next();
            if (key == piece.begin) queries_done();
        };
#pragma unroll
        for (int i = 0; i < V / 2; ++i) o[i] = 0.0f;
        scores_done();
        soften(s, alpha, rows, key, scale);
        pack(p, s);
        for (key -= KEYS; key >= piece.begin; key -= KEYS) {
            await_keys();
            start_next_scores();
            start_next_values();
            wgmma_wait<1>();
            pin(s);
            scores_done();
            soften(s, alpha, rows, key, scale);
            // This is over; but ptxas puts a wait for products as early in a basic block as it can, before the softmax.
            await_values();
            wgmma_wait<0>();
            values_done();
            rescale(o, alpha);
            pack(p, s);
        }
        start_next_values();
        const Piece done = piece;
        const int done_row = first + row;
        ++count;
        look();
        // The next piece's first scores, while the last values are summed and stored. If there are none, scores of anything:
        // a branch would make the compiler wait for every product.
        started = piece.head >= 0 && own == all;
        if (started) {
            await_queries();
            await_keys();
        }
        start_next_scores();
        wgmma_wait<1>();
        values_done();
        store(o, rows, done, done_row, to, logs);
        wgmma_wait<0>();
        pin(s);
    }
}

}  // namespace

// queries            q [T, HEADS * 192] as (64 columns, rows, 3 chunks a head)
// keys, values       kv [HEADS * SPAN, 256] as (64 columns, rows, 4 chunks), boxes of KEYS rows and of GRANULE
// ropes              k_rope [SPAN, 64] as (64 columns, rows, 1)
// q                  the same as `queries`; cosines, sines float32 [contexts, 32] at `positions` [T]
// starts, lengths    query_starts [B + 1], sequence_lengths [B]
// ends               of mla_contexts for tiles of ROWS queries
// o, logs            [T, HEADS * 128] bfloat16; [T, HEADS] log2 of the sum of exponentials, of this pass and those before
// next               two counters, clear before and after
// scale              of the scores, times log2 e; first: the pass's first token
extern "C" __global__ void __launch_bounds__(128 * (1 + GROUPS), 1)
    sm90_mla_prefill(const __grid_constant__ CUtensorMap queries, const __grid_constant__ CUtensorMap keys,
                     const __grid_constant__ CUtensorMap values, const __grid_constant__ CUtensorMap ropes,
                     const uint16_t* q, const float* cosines, const float* sines, const int* positions, const int* starts,
                     const int* lengths, const int* ends, uint32_t* o, float* logs, int* next, float scale, int first,
                     int sequences) {
    extern __shared__ uint8_t memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-shared_address(memory) & 1023));
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; ++slot) {
            barrier_init(&shared.piece_full[slot], 1);
            barrier_init(&shared.piece_free[slot], 4 * GROUPS);
            barrier_init(&shared.rope_full[slot], ROTATORS);
        }
        for (int group = 0; group < GROUPS; ++group) {
            barrier_init(&shared.q_full[group], 1);
            barrier_init(&shared.q_free[group], 4);
        }
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(&shared.k_full[stage], 1);
            barrier_init(&shared.k_free[stage], 4 * GROUPS);
            barrier_init(&shared.v_full[stage], 1);
            barrier_init(&shared.v_free[stage], 4 * GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x == 32) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&queries) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&keys) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&values) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&ropes) : "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x < 32)
            produce(shared, &queries, &keys, &values, &ropes, Step{starts, lengths, ends, sequences, first}, next);
        else
            rotate(shared, q, cosines, sines, positions);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        attend(shared, group - 1, scale, o, logs);
    }
}
