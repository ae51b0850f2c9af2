// Attention of one token over its blocks in place.

#pragma once

#include "bf16.h"

namespace pdserve {

constexpr long MAX_DIM = 256;
constexpr long KEYS = 16;  // scored at once

// The KV cache of one layer: at block 0 the keys [kv_heads, block_size, dim], then the values.
struct LayerCache {
    uint16_t* base;
    long block_stride;  // elements from block to block, all layers
    long kv_heads, block_size, dim;
    uint16_t* keys(int64_t block, long head) const {
        return base + block * block_stride + head * block_size * dim;
    }
    uint16_t* values(int64_t block, long head) const {
        return keys(block, head) + kv_heads * block_size * dim;
    }
};

// Sums of 16 vectors, each to its place of one vector.
inline __m512 sums_of_16(__m512 v[16]) {
    for (int i = 0; i < 8; i++) {  // pairs (i, i + 8): halves of 32 bytes
        __m512 low = _mm512_shuffle_f32x4(v[i], v[i + 8], 0x44);
        __m512 high = _mm512_shuffle_f32x4(v[i], v[i + 8], 0xEE);
        v[i] = _mm512_add_ps(low, high);  // 8 numbers of i, 8 of i + 8
    }
    for (int i = 0; i < 4; i++) {  // 4 numbers each of i, i + 4, i + 8, i + 12
        __m512 even = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88);
        __m512 odd = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xDD);
        v[i] = _mm512_add_ps(even, odd);  // lanes of 4: i, i + 8, i + 4, i + 12
    }
    for (int i = 0; i < 2; i++) {
        __m512 low = _mm512_unpacklo_ps(v[i], v[i + 2]), high = _mm512_unpackhi_ps(v[i], v[i + 2]);
        v[i] = _mm512_add_ps(low, high);  // in each lane: i, i + 2, i, i + 2
    }
    __m512 low = _mm512_unpacklo_ps(v[0], v[1]), high = _mm512_unpackhi_ps(v[0], v[1]);
    __m512 sums = _mm512_add_ps(low, high);  // in each lane: 0, 1, 2, 3 of lanes 0, 8, 4, 12
    return _mm512_shuffle_f32x4(sums, sums, 0xD8);
}

// Fetches a block's keys and values of one head, which are small pieces far from each other.
inline void prefetch_block(const LayerCache& cache, int64_t block, long head) {
    auto keys = reinterpret_cast<const char*>(cache.keys(block, head));
    auto values = reinterpret_cast<const char*>(cache.values(block, head));
    for (long i = 0; i < cache.block_size * cache.dim * 2; i += 64) {
        _mm_prefetch(keys + i, _MM_HINT_T0);
        _mm_prefetch(values + i, _MM_HINT_T0);
    }
}

// Scores of one query with `count` keys; the others are whatever.
template <int D>
inline __m512 scores_of(const __m512i query[D], const uint16_t* keys, long count) {
    __m512 products[KEYS];
    for (int t = 0; t < KEYS; t++) {
        products[t] = _mm512_setzero_ps();
        if (t < count)
            for (int i = 0; i < D; i++)
                products[t] = multiply_pairs(products[t], query[i],
                                             _mm512_loadu_si512(keys + (t * D + i) * 32));
    }
    return sums_of_16(products);
}

// What one query has seen of its keys; of 32 dimensions first those of `low`, as `store_unpacked`.
struct Seen {
    float maximum, total;
    alignas(64) float sums[MAX_DIM];
};

// Sums over values whose unpacking took 4 of 8 dimensions to `low` and 4 to `high`, in order.
inline void store_unpacked(uint16_t* out, __m512 low, __m512 high) {
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
    store_bf16(out, _mm512_permutex2var_ps(low, front, high));
    store_bf16(out + 16, _mm512_permutex2var_ps(low, back, high));
}

// The answer [dim] of one query that has seen its keys in `count` parts, `stride` apart.
inline void join(const Seen* parts, long count, long stride, long dim, uint16_t* out) {
    float maximum = -INFINITY, total = 0;
    for (long p = 0; p < count; p++)
        if (parts[p * stride].maximum > maximum) maximum = parts[p * stride].maximum;
    alignas(64) float sums[MAX_DIM] = {};
    for (long p = 0; p < count; p++) {
        const Seen& part = parts[p * stride];
        float factor = expf(part.maximum - maximum);
        total += part.total * factor;
        for (long i = 0; i < dim; i += 16)
            _mm512_store_ps(sums + i, _mm512_fmadd_ps(_mm512_load_ps(part.sums + i),
                                                      _mm512_set1_ps(factor),
                                                      _mm512_load_ps(sums + i)));
    }
    __m512 factor = _mm512_set1_ps(1 / total);
    for (long i = 0; i < dim; i += 32)
        store_unpacked(out + i, _mm512_mul_ps(_mm512_load_ps(sums + i), factor),
                       _mm512_mul_ps(_mm512_load_ps(sums + i + 16), factor));
}

// HEADS queries [HEADS, 32 * D], which share KV head `head`, over tokens [first, len) of the blocks
// `table`. Up to KEYS keys at a time, with a running maximum and total. Weights are rounded to
// bfloat16, so that one instruction takes the values of two tokens.
template <int HEADS, int D>
void attend(const uint16_t* queries, const LayerCache& cache, long head, const int64_t* table,
            long first, long len, float scale, Seen* out) {
    constexpr long DIM = 32 * D;
    __m512i query[HEADS][D];
    __m512 sums[HEADS][D][2];
    float maxima[HEADS], totals[HEADS];
    for (int g = 0; g < HEADS; g++) {
        maxima[g] = -INFINITY, totals[g] = 0;
        for (int i = 0; i < D; i++) {
            query[g][i] = _mm512_loadu_si512(queries + g * DIM + 32 * i);
            sums[g][i][0] = sums[g][i][1] = _mm512_setzero_ps();
        }
    }
    long last_block = (len - 1) / cache.block_size;
    for (long at = first; at < len;) {
        long slot = at % cache.block_size, index = at / cache.block_size;
        long count = cache.block_size - slot;
        if (count > len - at) count = len - at;
        if (count > KEYS) count = KEYS;
        const uint16_t* keys = cache.keys(table[index], head) + slot * DIM;
        const uint16_t* values = cache.values(table[index], head) + slot * DIM;
        if (index < last_block && at + count == (index + 1) * cache.block_size)
            prefetch_block(cache, table[index + 1], head);
        __mmask16 seen = static_cast<__mmask16>((1u << count) - 1);
        alignas(64) uint32_t weights[HEADS][KEYS];  // pairs of tokens, at even places
        for (int g = 0; g < HEADS; g++) {
            __m512 scores = count == KEYS ? scores_of<D>(query[g], keys, KEYS)
                                          : scores_of<D>(query[g], keys, count);
            scores = _mm512_mul_ps(scores, _mm512_set1_ps(scale));
            float largest = _mm512_mask_reduce_max_ps(seen, scores);
            if (largest > maxima[g]) {
                float shrink = expf(maxima[g] - largest);
                totals[g] *= shrink;
                for (int i = 0; i < D; i++)
                    for (int half = 0; half < 2; half++)
                        sums[g][i][half] =
                            _mm512_mul_ps(sums[g][i][half], _mm512_set1_ps(shrink));
                maxima[g] = largest;
            }
            scores = _mm512_sub_ps(scores, _mm512_set1_ps(maxima[g]));
            scores = _mm512_maskz_mov_ps(
                seen, exp2_ps(_mm512_mul_ps(scores, _mm512_set1_ps(LOG2_E))));
            totals[g] += _mm512_reduce_add_ps(scores);
            __m512 rounded = _mm512_castsi512_ps(
                _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(scores)));
            __m512i narrow = _mm512_castps_si512(rounded);
            _mm512_store_si512(weights[g],
                               _mm512_or_si512(narrow, _mm512_slli_epi32(_mm512_alignr_epi32(
                                                           narrow, narrow, 1), 16)));
        }
        for (long t = 0; t < count; t += 2)
            for (int i = 0; i < D; i++) {
                const uint16_t* from = values + t * DIM + 32 * i;
                __m512i one = _mm512_loadu_si512(from);
                __m512i two = t + 1 < count ? _mm512_loadu_si512(from + DIM)
                                            : _mm512_setzero_si512();
                __m512i low = _mm512_unpacklo_epi16(one, two);
                __m512i high = _mm512_unpackhi_epi16(one, two);
                for (int g = 0; g < HEADS; g++) {
                    __m512i weight = _mm512_set1_epi32(static_cast<int>(weights[g][t]));
                    sums[g][i][0] = multiply_pairs(sums[g][i][0], low, weight);
                    sums[g][i][1] = multiply_pairs(sums[g][i][1], high, weight);
                }
            }
        at += count;
    }
    for (int g = 0; g < HEADS; g++) {
        out[g].maximum = maxima[g], out[g].total = totals[g];
        for (int i = 0; i < D; i++)
            for (int half = 0; half < 2; half++)
                _mm512_store_ps(out[g].sums + 32 * i + 16 * half, sums[g][i][half]);
    }
}

template <int D>
void attend_group(const uint16_t* queries, long heads, const LayerCache& cache, long head,
                  const int64_t* table, long first, long len, float scale, Seen* out) {
    prefetch_block(cache, table[first / cache.block_size], head);
    for (long g = 0; g < heads;) {
        const uint16_t* from = queries + g * 32 * D;
        Seen* to = out + g;
        switch (heads - g) {
            case 1: attend<1, D>(from, cache, head, table, first, len, scale, to); g += 1; break;
            case 2: attend<2, D>(from, cache, head, table, first, len, scale, to); g += 2; break;
            case 3: attend<3, D>(from, cache, head, table, first, len, scale, to); g += 3; break;
            default: attend<4, D>(from, cache, head, table, first, len, scale, to); g += 4;
        }
    }
}

// All `heads` queries of one KV head over tokens [first, len), at least one; `out` has a place for
// each. Dimensions: DIMS in __init__.py.
inline void attend_head(const uint16_t* queries, long heads, const LayerCache& cache, long head,
                        const int64_t* table, long first, long len, float scale, Seen* out) {
    switch (cache.dim / 32) {
        case 1: return attend_group<1>(queries, heads, cache, head, table, first, len, scale, out);
        case 2: return attend_group<2>(queries, heads, cache, head, table, first, len, scale, out);
        case 3: return attend_group<3>(queries, heads, cache, head, table, first, len, scale, out);
        case 4: return attend_group<4>(queries, heads, cache, head, table, first, len, scale, out);
        case 8: return attend_group<8>(queries, heads, cache, head, table, first, len, scale, out);
    }
}

}  // namespace pdserve
