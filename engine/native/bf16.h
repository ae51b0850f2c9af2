// bfloat16 and tiles of weights in AVX-512: what the operations of this folder share.
//
// A weight [out, in] is kept as tiles [out / 64, in / 2, 64, 2]: one instruction then multiplies
// two inputs with 16 channels. Products are made by `Product::add`, a whole tile or half of one at
// a time, into `sums` [rows, TILE] in float32; what becomes of the sums is the caller's affair.

#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <vector>

namespace pdserve {

constexpr long TILE = 64;  // output channels of a tile
constexpr long HALF = TILE / 2;
constexpr long GROUP = 32;  // inputs that share a scale and a midpoint in int4
constexpr int MAX_ROWS = 32;  // of `x` in one product; as in __init__.py

inline float to_float(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
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

inline __m512 multiply_pairs(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh&>(a), reinterpret_cast<__m512bh&>(b));
}

inline __m512i broadcast_pair(const uint16_t* from) {
    int32_t pair;
    memcpy(&pair, from, sizeof pair);
    return _mm512_set1_epi32(pair);
}

constexpr float LOG2_E = 1.44269504088896341f;

// 2^x to about 3e-6 of the value, far below what is lost when it is rounded to bfloat16: 2^n times a
// polynomial of the rest. NaN for infinite x.
inline __m512 exp2_ps(__m512 x) {
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    x = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(9.5700966e-3f);
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(5.5917859e-2f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(2.4024744e-1f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(6.9312179e-1f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(y, n);
}

inline __m512 silu_ps(__m512 x) {
    __m512 e = exp2_ps(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.f), e));
}

// Quantised weights are read 16 channels x 2 inputs at a time. `load` gives whole numbers of 16 bits
// for products with few rows; `at_group` comes before `add_group`, which applies what a group of
// GROUP inputs has of its own. `load_whole` gives bfloat16 as in a plain tile, after `at_group`.

inline __m512i pairs(__m512i even, __m512i odd) {  // float bits: the upper halves
    __m512i high = _mm512_and_si512(odd, _mm512_set1_epi32(0xFFFF0000));
    return _mm512_or_si512(_mm512_srli_epi32(even, 16), high);
}

struct Int8 {  // tiles [out / 64, in / 2, 64, 2]; whole numbers, exact in bfloat16
    const int8_t* tile;
    Int8(const void* tiles, const uint16_t*, long channel, long inputs)
        : tile(static_cast<const int8_t*>(tiles) + channel * inputs) {}
    void at_group(long, int) {}
    __m512 add_group(__m512 sum, __m512 group, float x_scale, float) const {
        return _mm512_fmadd_ps(group, _mm512_set1_ps(x_scale), sum);
    }
    __m256i bytes(long i, int v) const {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + i * TILE + 32 * v));
    }
    __m512i load(long i, int v) const { return _mm512_cvtepi8_epi16(bytes(i, v)); }
    __m512i load_whole(long i, int v) const {
        __m512i both = _mm512_cvtepi16_epi32(bytes(i, v));
        __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(both, 24), 24);
        __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(both, 8));
        return pairs(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), _mm512_castps_si512(odd));
    }
};

struct Int4 {  // tiles [out / 64, in / 2, 64]: an even input, above it the odd one
    const uint8_t* tile;
    const uint16_t* scales;  // [out / 64, in / 32, 2, 64]: scales, then midpoints, of nibble 8
    __m512 scale, zero;      // zero: what nibble 0 stands for
    Int4(const void* tiles, const uint16_t* all, long channel, long inputs)
        : tile(static_cast<const uint8_t*>(tiles) + channel * inputs / 2),
          scales(all + channel * inputs / GROUP * 2) {}
    void at_group(long group, int v) {
        const uint16_t* from = scales + group * 2 * TILE + 16 * v;
        scale = load_bf16(from);
        zero = _mm512_fnmadd_ps(scale, _mm512_set1_ps(8), load_bf16(from + TILE));
    }
    __m512 add_group(__m512 sum, __m512 group, float x_scale, float x_sum) const {
        sum = _mm512_fmadd_ps(zero, _mm512_set1_ps(x_sum), sum);
        return _mm512_fmadd_ps(group, _mm512_mul_ps(scale, _mm512_set1_ps(x_scale)), sum);
    }
    __m512i bytes(long i, int v) const {
        auto from = reinterpret_cast<const __m128i*>(tile + i / 2 * TILE + 16 * v);
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(from));
    }
    __m512i load(long i, int v) const {
        __m512i both = bytes(i, v);
        both = _mm512_or_si512(both, _mm512_slli_epi32(both, 12));
        return _mm512_and_si512(both, _mm512_set1_epi32(0x000F000F));
    }
    __m512i whole(__m512i nibbles) const {
        __m512 weights = _mm512_fmadd_ps(_mm512_cvtepi32_ps(nibbles), scale, zero);
        return _mm512_add_epi32(_mm512_castps_si512(weights), _mm512_set1_epi32(0x8000));
    }
    __m512i load_whole(long i, int v) const {
        __m512i both = bytes(i, v);
        return pairs(whole(_mm512_and_si512(both, _mm512_set1_epi32(15))),
                     whole(_mm512_srli_epi32(both, 4)));
    }
};

// ROWS rows of x times VECTORS * 16 channels of a plain tile, inputs [0, inputs), added to sums.
// Meanwhile LINES cache lines for each pair of inputs are fetched from `next` on.
template <int ROWS, int VECTORS, int LINES>
inline void plain_part(const uint16_t* x, long x_stride, const uint16_t* tile, long inputs,
                       const char* next, float* sums) {
    __m512 part[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) part[r][v] = _mm512_load_ps(sums + r * TILE + 16 * v);
    for (long i = 0; i < inputs; i += 2, tile += 2 * TILE, next += 64 * LINES) {
        __m512i weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = _mm512_loadu_si512(tile + 32 * v);
        for (int l = 0; l < LINES; l++) _mm_prefetch(next + 64 * l, _MM_HINT_T1);
        for (int r = 0; r < ROWS; r++) {
            __m512i both = broadcast_pair(x + r * x_stride + i);
            for (int v = 0; v < VECTORS; v++)
                part[r][v] = multiply_pairs(part[r][v], weights[v], both);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + r * TILE + 16 * v, part[r][v]);
}

enum Kind : long { PLAIN = 0, INT8 = 1, INT4 = 2 };

// A weight and what belongs to it, as ctypes fills it in. `inputs` is even, a multiple of GROUP if
// quantised; `outputs` a multiple of TILE.
struct Linear {
    long kind;
    const void* tiles;
    const uint16_t* scales;  // int8: [outputs]; int4: see Int4; plain: none
    const uint16_t* bias;    // [outputs] or null
    long inputs, outputs;
};

constexpr int GROUP_ROWS = 4;

// Less than GROUP_ROWS rows.
template <int VECTORS>
void rest(const uint16_t* x, long x_stride, const uint16_t* tile, long inputs, long rows,
          float* sums) {
    if (rows == 1) plain_part<1, VECTORS, 0>(x, x_stride, tile, inputs, nullptr, sums);
    if (rows == 2) plain_part<2, VECTORS, 0>(x, x_stride, tile, inputs, nullptr, sums);
    if (rows == 3) plain_part<3, VECTORS, 0>(x, x_stride, tile, inputs, nullptr, sums);
}

// While one tile is multiplied with row after row, out of the second cache, the next is on its way
// to there: each group of rows fetches a share of it.
template <int VECTORS, int LINES>
void plain_sums(const Linear& w, const uint16_t* tile, const char* next, const uint16_t* x,
                long rows, float* sums) {
    long r = 0;
    for (; r + GROUP_ROWS <= rows; r += GROUP_ROWS, next += w.inputs / 2 * 64 * LINES)
        if (r < 4 / LINES * GROUP_ROWS)
            plain_part<GROUP_ROWS, VECTORS, LINES>(x + r * w.inputs, w.inputs, tile, w.inputs, next,
                                                   sums + r * TILE);
        else
            plain_part<GROUP_ROWS, VECTORS, 0>(x + r * w.inputs, w.inputs, tile, w.inputs, next,
                                               sums + r * TILE);
    rest<VECTORS>(x + r * w.inputs, w.inputs, tile, w.inputs, rows - r, sums + r * TILE);
}

template <int VECTORS>
void plain_sums(const Linear& w, long channel, const char* next, const uint16_t* x, long rows,
                float* sums) {
    const uint16_t* tile = static_cast<const uint16_t*>(w.tiles) +
                           channel / TILE * TILE * w.inputs + channel % TILE * 2;
    if (rows < GROUP_ROWS) {
        rest<VECTORS>(x, w.inputs, tile, w.inputs, rows, sums);
    } else if (rows < 2 * GROUP_ROWS) {
        plain_sums<VECTORS, 4>(w, tile, next, x, rows, sums);
    } else if (rows < 4 * GROUP_ROWS) {
        plain_sums<VECTORS, 2>(w, tile, next, x, rows, sums);
    } else {
        plain_sums<VECTORS, 1>(w, tile, next, x, rows, sums);
    }
}

// Rows of x as the kernel of a weight reads them. Quantised weights are whole numbers, and so are
// these beside them: of 16 bits, with a scale for each GROUP inputs, so an input keeps more than its
// bfloat16 had unless another of its group is 256 times as large. Lives until the thread's next one.
struct Inputs {
    const uint16_t* x;    // bfloat16 [rows, inputs]
    const int16_t* whole; // [rows, inputs]
    const float* scales;  // [rows, inputs / GROUP]
    const float* sums;    // of the inputs themselves, the same shape
};

inline Inputs prepared(const Linear& w, const uint16_t* x, long rows) {
    if (w.kind == PLAIN) return {x, nullptr, nullptr, nullptr};
    static thread_local std::vector<int16_t> whole;
    static thread_local std::vector<float> scales, sums;
    long groups = rows * w.inputs / GROUP;
    whole.resize(groups * GROUP);
    scales.resize(groups);
    sums.resize(groups);
    for (long g = 0; g < groups; g++) {
        __m512 a = load_bf16(x + g * GROUP), b = load_bf16(x + g * GROUP + 16);
        float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
        __m512 factor = _mm512_set1_ps(most > 0 ? 32767 / most : 0);
        auto to = reinterpret_cast<__m256i*>(whole.data() + g * GROUP);
        _mm256_storeu_si256(to, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a * factor)));
        _mm256_storeu_si256(to + 1, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(b * factor)));
        scales[g] = most / 32767;
        if (w.kind == INT4) sums[g] = _mm512_reduce_add_ps(_mm512_add_ps(a, b));
    }
    return {x, whole.data(), scales.data(), sums.data()};
}

// ROWS rows from `row` on times VECTORS * 16 channels of a quantised tile, added to sums. Sums of a
// group stay below 2^28.
template <class Weights, int ROWS, int VECTORS>
void quantised_part(Weights& weights, const Inputs& in, long row, long inputs, int first_vector,
                    float* sums) {
    const int16_t* x = in.whole + row * inputs;
    for (long group = 0; group < inputs / GROUP; group++) {
        __m512i part[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) part[r][v] = _mm512_setzero_si512();
        for (long i = group * GROUP; i < (group + 1) * GROUP; i += 2) {
            __m512i loaded[VECTORS];
            for (int v = 0; v < VECTORS; v++) loaded[v] = weights.load(i, first_vector + v);
            for (int r = 0; r < ROWS; r++) {
                __m512i both = broadcast_pair(reinterpret_cast<const uint16_t*>(x) + r * inputs + i);
                for (int v = 0; v < VECTORS; v++)
                    part[r][v] = _mm512_dpwssd_epi32(part[r][v], loaded[v], both);
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            weights.at_group(group, first_vector + v);
            for (int r = 0; r < ROWS; r++) {
                long at = (row + r) * (inputs / GROUP) + group;
                float* sum = sums + (row + r) * TILE + 16 * v;
                __m512 added = weights.add_group(_mm512_load_ps(sum), _mm512_cvtepi32_ps(part[r][v]),
                                                 in.scales[at], in.sums[at]);
                _mm512_store_ps(sum, added);
            }
        }
    }
}

template <class Weights, int VECTORS>
void quantised_sums(const Linear& w, long channel, const Inputs& in, long rows, float* sums) {
    int first = channel % TILE / 16;
    Weights weights(w.tiles, w.scales, channel / TILE * TILE, w.inputs);
    long r = 0;
    for (; r + GROUP_ROWS <= rows; r += GROUP_ROWS)
        quantised_part<Weights, GROUP_ROWS, VECTORS>(weights, in, r, w.inputs, first, sums);
    if (rows - r == 3) quantised_part<Weights, 3, VECTORS>(weights, in, r, w.inputs, first, sums);
    if (rows - r == 2) quantised_part<Weights, 2, VECTORS>(weights, in, r, w.inputs, first, sums);
    if (rows - r == 1) quantised_part<Weights, 1, VECTORS>(weights, in, r, w.inputs, first, sums);
}

// Scales and bias, of the channels from `channel` on.
template <int VECTORS>
void finish(const Linear& w, long channel, long rows, float* sums) {
    if (w.kind != INT8 && !w.bias) return;
    for (int v = 0; v < VECTORS; v++) {
        long at = channel + 16 * v;
        __m512 factor = w.kind == INT8 ? load_bf16(w.scales + at) : _mm512_set1_ps(1);
        __m512 start = w.bias ? load_bf16(w.bias + at) : _mm512_setzero_ps();
        for (long r = 0; r < rows; r++) {
            float* sum = sums + r * TILE + 16 * v;
            _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(sum), factor, start));
        }
    }
}

// The inputs' rows times the VECTORS * 16 channels from `channel` on, a multiple of 32, with scales
// and bias, to sums [rows, TILE] in float32. `rows` is at most MAX_ROWS. Meanwhile as much as such a
// tile is fetched from `next` on.
template <int VECTORS>
void product(const Linear& w, long channel, const char* next, const Inputs& in, long rows,
             float* sums) {
    for (long r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            _mm512_store_ps(sums + r * TILE + 16 * v, _mm512_setzero_ps());
    if (w.kind == PLAIN) plain_sums<VECTORS>(w, channel, next, in.x, rows, sums);
    if (w.kind == INT8) quantised_sums<Int8, VECTORS>(w, channel, in, rows, sums);
    if (w.kind == INT4) quantised_sums<Int4, VECTORS>(w, channel, in, rows, sums);
    finish<VECTORS>(w, channel, rows, sums);
}

// The tile with a channel in it, of a plain weight.
inline const char* tile_of(const Linear& w, long channel) {
    return static_cast<const char*>(w.tiles) + channel / TILE * TILE * w.inputs * 2;
}

// What thread `thread` of `threads` has of `span` channels, in halves of a tile.
struct Share {
    long at, end;
    Share(long span, int thread, int threads)
        : at(span / HALF * thread / threads), end(span / HALF * (thread + 1) / threads) {}
};

// Calls use(channel, num_channels, sums, next) for the channels of thread `thread` of `threads`, as
// whole tiles where its share has both halves of one. `span` channels are shared out. `next` of the
// last ones is `after`, what the thread reads when it has done them; of others their next tile.
template <class Use>
void each_product(const Linear& w, long span, const char* after, const Inputs& in, long rows,
                  int thread, int threads, Use use) {
    alignas(64) float sums[MAX_ROWS * TILE];
    Share own(span, thread, threads);
    while (own.at < own.end) {
        long channel = own.at * HALF;
        bool is_whole = own.at % 2 == 0 && own.at + 2 <= own.end;
        own.at += is_whole ? 2 : 1;
        const char* next = own.at < own.end ? tile_of(w, own.at * HALF) : after;
        if (is_whole)
            product<4>(w, channel, next, in, rows, sums);
        else
            product<2>(w, channel, next, in, rows, sums);
        use(channel, is_whole ? TILE : HALF, sums, next);
    }
}

// ------------------------------------------------------------ many rows

template <class Weights>
void widen_tile(Weights weights, uint16_t* tile, long inputs) {
    for (long group = 0; group < inputs / GROUP; group++)
        for (int v = 0; v < TILE / 16; v++) {
            weights.at_group(group, v);
            for (long i = group * GROUP; i < (group + 1) * GROUP; i += 2)
                _mm512_storeu_si512(tile + i * TILE + 32 * v, weights.load_whole(i, v));
        }
}

// The tile of the channels from `channel` on as plain numbers, int8 without its scales: itself, or
// written to `scratch` [inputs, TILE].
inline const uint16_t* plain_tile(const Linear& w, long channel, uint16_t* scratch) {
    if (w.kind == PLAIN) return static_cast<const uint16_t*>(w.tiles) + channel * w.inputs;
    if (w.kind == INT8) widen_tile(Int8(w.tiles, nullptr, channel, w.inputs), scratch, w.inputs);
    if (w.kind == INT4) widen_tile(Int4(w.tiles, w.scales, channel, w.inputs), scratch, w.inputs);
    return scratch;
}

// At most GROUP_ROWS rows of x times a plain tile, with scales and bias, to sums [rows, TILE]. With
// all inputs at once the sums stay in registers: at 128 rows and more this is at 80 to 93 percent
// of what the processor multiplies, which is what oneDNN reaches.
inline void group_product(const Linear& w, long channel, const uint16_t* tile, const uint16_t* x,
                          long rows, float* sums) {
    memset(sums, 0, GROUP_ROWS * TILE * sizeof(float));
    if (rows == GROUP_ROWS)
        plain_part<GROUP_ROWS, 4, 0>(x, w.inputs, tile, w.inputs, nullptr, sums);
    else
        rest<4>(x, w.inputs, tile, w.inputs, rows, sums);
    finish<4>(w, channel, rows, sums);
}

}  // namespace pdserve
