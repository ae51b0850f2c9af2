// What decoding with few rows spends its time on, for AVX-512 with bfloat16. C linkage, no library
// but OpenMP, which is the one that torch has loaded. See native.py for shapes and the build.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

namespace {

constexpr long TILE = 64;  // output channels that one thread computes at a time
constexpr int VECTORS = TILE / 16;

inline float to_float(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    __builtin_memcpy(&value, &wide, sizeof value);
    return value;
}

inline __m512 load_bf16(const uint16_t* from) {
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline void store_bf16(uint16_t* to, __m512 values) {
    __m256bh narrow = _mm512_cvtneps_pbh(values);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i&>(narrow));
}

// One tile's products with ROWS rows of x. Tile: [in / 2, 64, 2], so that one instruction
// multiplies two inputs of 16 channels.
template <int ROWS>
void tile_product(const uint16_t* x, const uint16_t* tile, const uint16_t* bias, uint16_t* out,
                  long inputs, long outputs) {
    __m512 sums[ROWS][VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        __m512 start = bias ? load_bf16(bias + 16 * v) : _mm512_setzero_ps();
        for (int r = 0; r < ROWS; r++) sums[r][v] = start;
    }
    for (long i = 0; i < inputs; i += 2, tile += 2 * TILE) {
        __m512i weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = _mm512_loadu_si512(tile + 32 * v);
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            __builtin_memcpy(&pair, x + r * inputs + i, sizeof pair);
            __m512i both = _mm512_set1_epi32(pair);
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = _mm512_dpbf16_ps(sums[r][v], reinterpret_cast<__m512bh&>(weights[v]),
                                              reinterpret_cast<__m512bh&>(both));
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store_bf16(out + r * outputs + 16 * v, sums[r][v]);
}

// Quantised weights become 16 channels x 2 inputs of bfloat16, as in a plain tile, in registers.
// `at_group` comes before the loads of each GROUP inputs. `load` gives whole numbers, to which
// `add_group` applies what the group has of its own; `load_whole` gives the weights themselves.
constexpr long GROUP = 32;

inline __m512i pairs(__m512i even, __m512i odd) {  // float bits: the upper halves
    __m512i high = _mm512_and_si512(odd, _mm512_set1_epi32(0xFFFF0000));
    return _mm512_or_si512(_mm512_srli_epi32(even, 16), high);
}

inline float sum_of_group(const uint16_t* x) {
    __m512i values = _mm512_loadu_si512(x), ones = _mm512_set1_epi16(0x3F80);
    return _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(),
                                                 reinterpret_cast<__m512bh&>(values),
                                                 reinterpret_cast<__m512bh&>(ones)));
}

struct Int8 {  // tiles [out / 64, in / 2, 64, 2]; whole numbers, exact in bfloat16
    const int8_t* tile;
    Int8(const void* tiles, const uint16_t*, long channel, long inputs)
        : tile(static_cast<const int8_t*>(tiles) + channel * inputs) {}
    static constexpr bool HAS_MIDPOINT = false;
    void at_group(long, int) {}
    __m512 add_group(__m512 sum, __m512 group, float) const { return _mm512_add_ps(sum, group); }
    __m512i load_whole(long i, int v) const { return load(i, v); }
    __m512i load(long i, int v) const {
        auto from = reinterpret_cast<const __m256i*>(tile + i * TILE + 32 * v);
        __m512i both = _mm512_cvtepi16_epi32(_mm256_loadu_si256(from));
        __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(both, 24), 24);
        __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(both, 8));
        return pairs(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), _mm512_castps_si512(odd));
    }
};

struct Int4 {  // tiles [out / 64, in / 2, 64]: an even input, above it the odd one
    const uint8_t* tile;
    const uint16_t* scales;  // [out / 64, in / 32, 2, 64]: scales, then midpoints
    __m512 scale, midpoint;
    __m512i table;  // of a nibble: (nibble - 8) in bfloat16, twice
    static constexpr bool HAS_MIDPOINT = true;
    Int4(const void* tiles, const uint16_t* all, long channel, long inputs)
        : tile(static_cast<const uint8_t*>(tiles) + channel * inputs / 2),
          scales(all + channel * inputs / GROUP * 2) {
        uint16_t numbers[32];
        for (int i = 0; i < 32; i++) {
            float number = i % 16 - 8;
            __builtin_memcpy(&numbers[i], reinterpret_cast<char*>(&number) + 2, 2);
        }
        table = _mm512_loadu_si512(numbers);
    }
    void at_group(long group, int v) {
        const uint16_t* from = scales + group * 2 * TILE + 16 * v;
        scale = load_bf16(from);
        midpoint = load_bf16(from + TILE);
    }
    __m512i bytes(long i, int v) const {
        auto from = reinterpret_cast<const __m128i*>(tile + i / 2 * TILE + 16 * v);
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(from));
    }
    // The table is looked up with 5 bits: in the lower half of a pair the fifth is a neighbour's.
    __m512i load(long i, int v) const {
        __m512i both = bytes(i, v);
        return _mm512_permutexvar_epi16(_mm512_or_si512(both, _mm512_slli_epi32(both, 12)), table);
    }
    __m512 add_group(__m512 sum, __m512 group, float inputs) const {
        sum = _mm512_fmadd_ps(midpoint, _mm512_set1_ps(inputs), sum);
        return _mm512_fmadd_ps(group, scale, sum);
    }
    __m512i whole(__m512i nibbles) const {
        __m512 numbers = _mm512_sub_ps(_mm512_cvtepi32_ps(nibbles), _mm512_set1_ps(8));
        __m512 weights = _mm512_fmadd_ps(numbers, scale, midpoint);
        return _mm512_add_epi32(_mm512_castps_si512(weights), _mm512_set1_epi32(0x8000));
    }
    __m512i load_whole(long i, int v) const {
        __m512i both = bytes(i, v);
        return pairs(whole(_mm512_and_si512(both, _mm512_set1_epi32(15))),
                     whole(_mm512_srli_epi32(both, 4)));
    }
};

template <class Weights>
void widen_tile(Weights weights, uint16_t* tile, long inputs) {
    for (long group = 0; group < inputs / GROUP; group++)
        for (int v = 0; v < VECTORS; v++) {
            weights.at_group(group, v);
            for (long i = group * GROUP; i < (group + 1) * GROUP; i += 2)
                _mm512_storeu_si512(tile + i * TILE + 32 * v, weights.load_whole(i, v));
        }
}

// out = (x * weights) * scales + bias for ROWS rows; no scales: 1.
template <class Weights, int ROWS>
void quantised_product(Weights weights, const uint16_t* x, const uint16_t* scales,
                       const uint16_t* bias, uint16_t* out, long inputs, long outputs) {
    __m512 sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_setzero_ps();
    for (long group = 0; group < inputs / GROUP; group++) {
        float group_inputs[ROWS] = {};
        if (Weights::HAS_MIDPOINT)
            for (int r = 0; r < ROWS; r++)
                group_inputs[r] = sum_of_group(x + r * inputs + group * GROUP);
        for (int v = 0; v < VECTORS; v++) {
            weights.at_group(group, v);
            __m512 part[ROWS];
            for (int r = 0; r < ROWS; r++) part[r] = _mm512_setzero_ps();
            for (long i = group * GROUP; i < (group + 1) * GROUP; i += 2) {
                __m512i loaded = weights.load(i, v);
                for (int r = 0; r < ROWS; r++) {
                    int32_t pair;
                    __builtin_memcpy(&pair, x + r * inputs + i, sizeof pair);
                    __m512i both = _mm512_set1_epi32(pair);
                    part[r] = _mm512_dpbf16_ps(part[r], reinterpret_cast<__m512bh&>(loaded),
                                               reinterpret_cast<__m512bh&>(both));
                }
            }
            for (int r = 0; r < ROWS; r++)
                sums[r][v] = weights.add_group(sums[r][v], part[r], group_inputs[r]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) {
            __m512 factor = scales ? load_bf16(scales + 16 * v) : _mm512_set1_ps(1);
            __m512 start = bias ? load_bf16(bias + 16 * v) : _mm512_setzero_ps();
            store_bf16(out + r * outputs + 16 * v, _mm512_fmadd_ps(sums[r][v], factor, start));
        }
}

template <class Weights>
void quantised_linear(const uint16_t* x, const void* tiles, const uint16_t* group_scales,
                      const uint16_t* scales, const uint16_t* bias, uint16_t* out, long rows,
                      long inputs, long outputs, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long channel = 0; channel < outputs; channel += TILE) {
        Weights weights(tiles, group_scales, channel, inputs);
        const uint16_t* s = scales ? scales + channel : nullptr;
        const uint16_t* b = bias ? bias + channel : nullptr;
        long r = 0;
        for (; r + 8 <= rows; r += 8)
            quantised_product<Weights, 8>(weights, x + r * inputs, s, b,
                                          out + r * outputs + channel, inputs, outputs);
        for (; r + 4 <= rows; r += 4)
            quantised_product<Weights, 4>(weights, x + r * inputs, s, b,
                                          out + r * outputs + channel, inputs, outputs);
        for (; r < rows; r++)
            quantised_product<Weights, 1>(weights, x + r * inputs, s, b,
                                          out + r * outputs + channel, inputs, outputs);
    }
}

template <class Weights>
void widen(const void* tiles, const uint16_t* group_scales, uint16_t* to, long inputs,
           long outputs, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long channel = 0; channel < outputs; channel += TILE)
        widen_tile(Weights(tiles, group_scales, channel, inputs), to + channel * inputs,
                   inputs);
}

constexpr long MAX_GROUP_NUMBERS = 4096;  // query heads of one KV head x head_dim
constexpr long MAX_BLOCK = 1024;

inline float dot(const uint16_t* a, const uint16_t* b, long size) {
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < size; i += 32) {
        __m512i left = _mm512_loadu_si512(a + i), right = _mm512_loadu_si512(b + i);
        sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh&>(left),
                               reinterpret_cast<__m512bh&>(right));
    }
    return _mm512_reduce_add_ps(sum);
}

// One query over keys [from, to) of one block, into the running maximum, total and sum.
void attend_block(const uint16_t* query, const uint16_t* keys, const uint16_t* values, long from,
                  long to, long dim, float scale, float* maximum, float* total, float* sums) {
    float scores[MAX_BLOCK];
    float largest = *maximum;
    for (long t = from; t < to; t++) {
        scores[t] = dot(query, keys + t * dim, dim) * scale;
        largest = fmaxf(largest, scores[t]);
    }
    __m512 shrink = _mm512_set1_ps(expf(*maximum - largest));
    *total *= _mm512_cvtss_f32(shrink);
    for (long t = from; t < to; t++) *total += scores[t] = expf(scores[t] - largest);
    for (long i = 0; i < dim; i += 16) {
        __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(sums + i), shrink);
        for (long t = from; t < to; t++)
            sum = _mm512_fmadd_ps(_mm512_set1_ps(scores[t]), load_bf16(values + t * dim + i), sum);
        _mm512_storeu_ps(sums + i, sum);
    }
    *maximum = largest;
}

}  // namespace

extern "C" {

// out[r, o] = sum over i of x[r, i] * weight[o, i], + bias[o] unless null.
void pdserve_linear_bf16(const uint16_t* x, const uint16_t* weight, const uint16_t* bias,
                         uint16_t* out, long rows, long inputs, long outputs, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long tile = 0; tile < outputs / TILE; tile++) {
        const uint16_t* w = weight + tile * TILE * inputs;
        const uint16_t* b = bias ? bias + tile * TILE : nullptr;
        uint16_t* to = out + tile * TILE;
        long r = 0;
        for (; r + 4 <= rows; r += 4)
            tile_product<4>(x + r * inputs, w, b, to + r * outputs, inputs, outputs);
        for (; r < rows; r++)
            tile_product<1>(x + r * inputs, w, b, to + r * outputs, inputs, outputs);
    }
}

// The same with quantised weights; `inputs` is a multiple of 32.
void pdserve_linear_int8(const uint16_t* x, const void* tiles, const uint16_t* scales,
                         const uint16_t* bias, uint16_t* out, long rows, long inputs, long outputs,
                         int threads) {
    quantised_linear<Int8>(x, tiles, nullptr, scales, bias, out, rows, inputs, outputs, threads);
}

void pdserve_linear_int4(const uint16_t* x, const void* tiles, const uint16_t* scales,
                         const uint16_t* bias, uint16_t* out, long rows, long inputs, long outputs,
                         int threads) {
    quantised_linear<Int4>(x, tiles, scales, nullptr, bias, out, rows, inputs, outputs, threads);
}

// A whole weight as pdserve_linear_bf16 reads it; int8 without its scales.
void pdserve_widen_int8(const void* tiles, const uint16_t* scales, uint16_t* to, long inputs,
                        long outputs, int threads) {
    widen<Int8>(tiles, scales, to, inputs, outputs, threads);
}

void pdserve_widen_int4(const void* tiles, const uint16_t* scales, uint16_t* to, long inputs,
                        long outputs, int threads) {
    widen<Int4>(tiles, scales, to, inputs, outputs, threads);
}

// RMS norm of each row; size is a multiple of 16.
void pdserve_rms_norm_bf16(const uint16_t* x, const uint16_t* weight, uint16_t* out, long rows,
                           long size, float eps) {
    for (long r = 0; r < rows; r++, x += size, out += size) {
        __m512 squares = _mm512_setzero_ps();
        for (long i = 0; i < size; i += 16) {
            __m512 value = load_bf16(x + i);
            squares = _mm512_fmadd_ps(value, value, squares);
        }
        __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(squares) / size + eps);
        __m512 factor = _mm512_div_ps(_mm512_set1_ps(1), _mm512_sqrt_ps(mean));
        for (long i = 0; i < size; i += 16) {
            __m512 value = _mm512_mul_ps(load_bf16(x + i), factor);
            store_bf16(out + i, _mm512_mul_ps(value, load_bf16(weight + i)));
        }
    }
}

// Attention of one query token a sequence over its blocks in place. `cache` is at this layer of
// block 0; in a block come the keys [kv_heads, block_size, dim], then the values alike.
void pdserve_decode_attention_bf16(const uint16_t* query, long query_stride, const uint16_t* cache,
                                   long block_stride, const int64_t* tables, long table_stride,
                                   const int64_t* lens, uint16_t* out, long sequences,
                                   long kv_heads, long group, long block_size, long dim,
                                   long window, float scale, int threads) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
    for (long s = 0; s < sequences; s++)
        for (long head = 0; head < kv_heads; head++) {
            alignas(64) float sums[MAX_GROUP_NUMBERS];
            for (long i = 0; i < group * dim; i++) sums[i] = 0;
            float maxima[MAX_GROUP_NUMBERS / 32], totals[MAX_GROUP_NUMBERS / 32];
            for (long g = 0; g < group; g++) maxima[g] = -INFINITY, totals[g] = 0;
            const uint16_t* queries = query + s * query_stride + head * group * dim;
            long first = window && lens[s] > window ? lens[s] - window : 0;
            for (long b = first / block_size; b * block_size < lens[s]; b++) {
                const uint16_t* keys = cache + tables[s * table_stride + b] * block_stride +
                                       head * block_size * dim;
                const uint16_t* values = keys + kv_heads * block_size * dim;
                long start = b * block_size;
                long from = first > start ? first - start : 0;
                long to = lens[s] - start < block_size ? lens[s] - start : block_size;
                for (long g = 0; g < group; g++)
                    attend_block(queries + g * dim, keys, values, from, to, dim, scale, maxima + g,
                                 totals + g, sums + g * dim);
            }
            uint16_t* to = out + (s * kv_heads + head) * group * dim;
            for (long g = 0; g < group; g++)
                for (long i = 0; i < dim; i += 16)
                    store_bf16(to + g * dim + i, _mm512_div_ps(_mm512_load_ps(sums + g * dim + i),
                                                               _mm512_set1_ps(totals[g])));
        }
}

}  // extern "C"
