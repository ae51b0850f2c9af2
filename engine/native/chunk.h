// Attention of a prompt chunk: products of blocks of queries with packed keys and values.

#pragma once

#include "attention.h"

namespace pdserve {

constexpr long SPAN = 64;   // keys of a packed piece
constexpr long ROWS = 32;   // query rows, tokens times heads of a group, that go through together
constexpr float LEEWAY = 8;  // powers of 2

// 16 x 16 numbers of 32 bits, rows to columns.
inline void transpose(__m512i rows[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            t[8 * j + i] = _mm512_shuffle_i32x4(rows[8 * j + i], rows[8 * j + i + 4], 0x88);
            t[8 * j + i + 4] = _mm512_shuffle_i32x4(rows[8 * j + i], rows[8 * j + i + 4], 0xDD);
        }
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    }
}

// One chunk of a prompt: its queries are at positions [prefix, prefix + tokens), and the keys that
// any of them sees at [first, prefix + tokens). Keys and values are packed once for all queries:
// keys [dim / 2, SPAN, 2], so that a query's product with SPAN keys is a product with a tile of
// weights; values [SPAN / 2, dim, 2] likewise, with dimensions in the order of the unpacking.
class Chunk {
   public:
    Chunk(const LayerCache& cache, const int64_t* table, long first, long end, uint16_t* packed)
        : cache_(cache), table_(table), first_(first), end_(end), packed_(packed),
          spans_((end - first + SPAN - 1) / SPAN) {}

    long spans() const { return spans_; }

    // Piece `span` of KV head `head`. The next one is fetched meanwhile: pieces of a block are too
    // small for the processor to see that they follow each other.
    void pack(long head, long span) {
        const long dim = cache_.dim;
        const uint16_t *keys[SPAN], *values[SPAN];
        static const uint16_t zeros[MAX_DIM] = {};
        for (long t = 0; t < SPAN; t++) {
            long at = first_ + span * SPAN + t;
            keys[t] = values[t] = zeros;
            if (at < end_) find(head, at, keys[t], values[t]);
            const uint16_t *key, *value;
            if (at + SPAN >= end_) continue;
            find(head, at + SPAN, key, value);
            for (long i = 0; i < dim; i += 32) {
                _mm_prefetch(reinterpret_cast<const char*>(key + i), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(value + i), _MM_HINT_T0);
            }
        }
        uint16_t* to = keys_of(head, span);
        for (long t = 0; t < SPAN; t += 16)
            for (long i = 0; i < dim; i += 32) {
                __m512i rows[16];
                for (int r = 0; r < 16; r++) rows[r] = _mm512_loadu_si512(keys[t + r] + i);
                transpose(rows);
                for (int r = 0; r < 16; r++)
                    _mm512_storeu_si512(to + (i / 2 + r) * 2 * SPAN + 2 * t, rows[r]);
            }
        to = values_of(head, span);
        for (long t = 0; t < SPAN; t += 2, to += 2 * dim)
            for (long i = 0; i < dim; i += 32) {
                __m512i one = _mm512_loadu_si512(values[t] + i);
                __m512i two = _mm512_loadu_si512(values[t + 1] + i);
                _mm512_storeu_si512(to + 2 * i, _mm512_unpacklo_epi16(one, two));
                _mm512_storeu_si512(to + 2 * i + 32, _mm512_unpackhi_epi16(one, two));
            }
    }

    // `heads` queries of KV head `head` of `tokens` tokens from `position` on; rows and outputs
    // of a token `stride` and `out_stride` apart. heads * tokens is at most ROWS.
    template <int D>
    void attend(long head, long heads, long tokens, long position, const uint16_t* query,
                long stride, uint16_t* out, long out_stride, long window, float scale) const {
        constexpr long DIM = 32 * D;
        alignas(64) uint16_t rows[ROWS * DIM], weights[ROWS * SPAN];
        alignas(64) float scores[ROWS * SPAN], sums[ROWS * DIM];
        Row seen[ROWS];
        float factor = scale * LOG2_E;
        long count = heads * tokens;
        for (long r = 0; r < count; r++)
            memcpy(rows + r * DIM, query + r / heads * stride + r % heads * DIM, 2 * DIM);
        memset(sums, 0, count * DIM * sizeof(float));
        long oldest = window ? position - window + 1 : 0;
        long from = oldest > first_ ? (oldest - first_) / SPAN : 0;
        for (long span = from; span < spans_; span++) {
            long start = first_ + span * SPAN;
            if (start > position + tokens - 1) break;
            multiply<4, true>(rows, DIM, keys_of(head, span), SPAN, DIM, count, scores, SPAN);
            bool is_masked = start + SPAN - 1 > position ||
                             (window && start <= position + tokens - 1 - window);
            for (long r = 0; r < count; r++) {
                long at = position + r / heads;
                soften(scores + r * SPAN, weights + r * SPAN, start, at,
                       window ? at - window + 1 : 0, is_masked, factor, seen[r], sums + r * DIM,
                       DIM);
            }
            const uint16_t* values = values_of(head, span);
            if (DIM % 64 == 0)
                for (long i = 0; i < DIM; i += 64)
                    multiply<4, false>(weights, SPAN, values + 2 * i, DIM, SPAN, count, sums + i, DIM);
            else
                for (long i = 0; i < DIM; i += 32)
                    multiply<2, false>(weights, SPAN, values + 2 * i, DIM, SPAN, count, sums + i, DIM);
        }
        for (long r = 0; r < count; r++) {
            __m512 share = _mm512_set1_ps(1 / _mm512_reduce_add_ps(seen[r].totals));
            for (long i = 0; i < DIM; i += 32) {
                __m512 low = _mm512_mul_ps(_mm512_load_ps(sums + r * DIM + i), share);
                __m512 high = _mm512_mul_ps(_mm512_load_ps(sums + r * DIM + i + 16), share);
                store_unpacked(out + r / heads * out_stride + r % heads * DIM + i, low, high);
            }
        }
    }

   private:
    void find(long head, long at, const uint16_t*& key, const uint16_t*& value) const {
        long slot = at % cache_.block_size * cache_.dim;
        int64_t block = table_[at / cache_.block_size];
        key = cache_.keys(block, head) + slot;
        value = cache_.values(block, head) + slot;
    }

    uint16_t* keys_of(long head, long span) const {
        return packed_ + (head * spans_ + span) * 2 * SPAN * cache_.dim;
    }
    uint16_t* values_of(long head, long span) const {
        return keys_of(head, span) + SPAN * cache_.dim;
    }

    // x [count, inputs] with rows x_stride apart, times a tile [inputs / 2, width, 2], of which
    // 16 * VECTORS columns are taken, to sums with rows sum_stride apart: added, unless IS_FIRST.
    template <int VECTORS, bool IS_FIRST>
    static void multiply(const uint16_t* x, long x_stride, const uint16_t* tile, long width,
                         long inputs, long count, float* sums, long sum_stride) {
        auto some = [&](auto product, long r) {
            product(x + r * x_stride, x_stride, tile, width, inputs, sums + r * sum_stride,
                    sum_stride);
        };
        long r = 0;
        for (; r + 4 <= count; r += 4) some(part<4, VECTORS, IS_FIRST>, r);
        if (count - r == 3) some(part<3, VECTORS, IS_FIRST>, r);
        if (count - r == 2) some(part<2, VECTORS, IS_FIRST>, r);
        if (count - r == 1) some(part<1, VECTORS, IS_FIRST>, r);
    }

    template <int N, int VECTORS, bool IS_FIRST>
    static void part(const uint16_t* x, long x_stride, const uint16_t* tile, long width,
                     long inputs, float* sums, long sum_stride) {
        __m512 all[N][VECTORS];
        for (int r = 0; r < N; r++)
            for (int v = 0; v < VECTORS; v++)
                all[r][v] = IS_FIRST ? _mm512_setzero_ps()
                                     : _mm512_load_ps(sums + r * sum_stride + 16 * v);
        for (long i = 0; i < inputs; i += 2, tile += 2 * width) {
            __m512i columns[VECTORS];
            for (int v = 0; v < VECTORS; v++) columns[v] = _mm512_loadu_si512(tile + 32 * v);
            for (int r = 0; r < N; r++) {
                __m512i both = broadcast_pair(x + r * x_stride + i);
                for (int v = 0; v < VECTORS; v++)
                    all[r][v] = multiply_pairs(all[r][v], columns[v], both);
            }
        }
        for (int r = 0; r < N; r++)
            for (int v = 0; v < VECTORS; v++)
                _mm512_store_ps(sums + r * sum_stride + 16 * v, all[r][v]);
    }

    // What one row has seen so far: weights are 2^(factor * (score - base)), `totals` their sums by
    // lane.
    struct Row {
        float base = -INFINITY;
        __m512 totals = _mm512_setzero_ps();
    };

    // Scores of one query with the keys from `start` on, of which it sees [oldest, at], become
    // weights. float32 sums bear weights above 1, so the base need not be the maximum: it moves
    // when a score is LEEWAY powers of 2 above it, which after the first keys is seldom.
    static void soften(const float* scores, uint16_t* weights, long start, long at, long oldest,
                       bool is_masked, float factor, Row& row, float* sums, long dim) {
        constexpr int VECTORS = SPAN / 16;
        __m512 x[VECTORS], largest = _mm512_set1_ps(-INFINITY);
        __mmask16 seen[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            x[v] = _mm512_load_ps(scores + 16 * v);
            if (is_masked) {
                __m512i keys = _mm512_add_epi32(
                    _mm512_set1_epi32(static_cast<int>(start + 16 * v)),
                    _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
                seen[v] = _mm512_cmple_epi32_mask(keys, _mm512_set1_epi32(static_cast<int>(at))) &
                          _mm512_cmpge_epi32_mask(keys,
                                                  _mm512_set1_epi32(static_cast<int>(oldest)));
                x[v] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen[v], x[v]);
            }
            largest = _mm512_max_ps(largest, x[v]);
        }
        __m512 limit = _mm512_set1_ps(row.base + LEEWAY / factor);
        if (_mm512_cmp_ps_mask(largest, limit, _CMP_GT_OQ))
            move_base(row, _mm512_reduce_max_ps(largest), factor, sums, dim);
        __m512 base = _mm512_set1_ps(factor * row.base);
        for (int v = 0; v < VECTORS; v++) {
            x[v] = exp2_ps(_mm512_fmsub_ps(x[v], _mm512_set1_ps(factor), base));
            if (is_masked) x[v] = _mm512_maskz_mov_ps(seen[v], x[v]);
            row.totals = _mm512_add_ps(row.totals, x[v]);
            store_bf16(weights + 16 * v, x[v]);
        }
    }

    // What was summed before shrinks.
    static void move_base(Row& row, float base, float factor, float* sums, long dim) {
        __m512 shrink = _mm512_set1_ps(exp2f(factor * (row.base - base)));
        row.totals = _mm512_mul_ps(row.totals, shrink);
        for (long i = 0; i < dim; i += 16)
            _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), shrink));
        row.base = base;
    }

    LayerCache cache_;
    const int64_t* table_;
    long first_, end_;
    uint16_t* packed_;
    long spans_;
};

// What is asked of one chunk in one layer: queries [tokens, heads, dim] at positions from `prefix`
// on, and where the outputs go; rows of a token `stride` and `out_stride` apart.
struct Queries {
    const uint16_t* query;
    long stride;
    uint16_t* out;
    long out_stride;
    long tokens, prefix, heads, window;
    float scale;

    long first_key() const { return window && prefix >= window ? prefix - window + 1 : 0; }
};

// The work is cut into pieces of some tokens for one KV head, which are independent of each other.
class ChunkWork {
   public:
    ChunkWork(const LayerCache& cache, const int64_t* table, const Queries& q, uint16_t* packed)
        : q_(q), kv_heads_(cache.kv_heads), dim_(cache.dim), group_(q.heads / cache.kv_heads),
          step_(even_step(q.tokens, group_ < ROWS ? ROWS / group_ : 1)),
          chunk_(cache, table, q.first_key(), q.prefix + q.tokens, packed) {}

    // Of what is packed: 16-bit numbers for each KV head and span of keys.
    static long packed_size(const LayerCache& cache, long first, long end) {
        return cache.kv_heads * ((end - first + SPAN - 1) / SPAN) * 2 * SPAN * cache.dim;
    }

    long num_packs() const { return kv_heads_ * chunk_.spans(); }
    void pack(long i) { chunk_.pack(i / chunk_.spans(), i % chunk_.spans()); }

    // Once all is packed. The longest first.
    long num_pieces() const { return kv_heads_ * rows_of_pieces(); }

    // Piece `i`: the outputs of `tokens` tokens, `size` numbers each, at `out`.
    struct Place {
        long head, start, tokens, size;
        uint16_t* out;
    };
    Place place(long i) const {
        long head = i % kv_heads_, start = (rows_of_pieces() - 1 - i / kv_heads_) * step_;
        return {head, start, q_.tokens - start < step_ ? q_.tokens - start : step_, group_ * dim_,
                q_.out + start * q_.out_stride + head * group_ * dim_};
    }
    long out_stride() const { return q_.out_stride; }

    void attend(long i) const { attend(i, place(i).out, q_.out_stride); }

    // The same to `out`, with rows `stride` apart.
    void attend(long i, uint16_t* out, long stride) const {
        switch (dim_ / 32) {
            case 1: return attend_piece<1>(place(i), out, stride);
            case 2: return attend_piece<2>(place(i), out, stride);
            case 3: return attend_piece<3>(place(i), out, stride);
            case 4: return attend_piece<4>(place(i), out, stride);
            case 8: return attend_piece<8>(place(i), out, stride);
        }
    }

   private:
    // As many pieces as with `most` tokens in each, but all alike.
    static long even_step(long tokens, long most) {
        long pieces = (tokens + most - 1) / most;
        return (tokens + pieces - 1) / pieces;
    }

    long rows_of_pieces() const { return (q_.tokens + step_ - 1) / step_; }

    template <int D>
    void attend_piece(const Place& at, uint16_t* out, long stride) const {
        const uint16_t* from = q_.query + at.start * q_.stride + at.head * group_ * dim_;
        for (long g = 0; g < group_; g += ROWS) {  // more heads than rows: a few at a time
            long heads = group_ - g < ROWS ? group_ - g : ROWS;
            chunk_.attend<D>(at.head, heads, at.tokens, q_.prefix + at.start, from + g * dim_,
                             q_.stride, out + g * dim_, stride, q_.window, q_.scale);
        }
    }

    Queries q_;
    long kv_heads_, dim_, group_, step_;
    Chunk chunk_;
};

}  // namespace pdserve
