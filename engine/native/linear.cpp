// Single operations of a decoder layer; C linkage, shapes in ops of __init__.py.

#include "bf16.h"

using namespace pdserve;

namespace {

template <class Weights>
void widen(const void* tiles, const uint16_t* group_scales, uint16_t* to, long inputs,
           long outputs, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long channel = 0; channel < outputs; channel += TILE)
        widen_tile(Weights(tiles, group_scales, channel, inputs), to + channel * inputs, inputs);
}

}  // namespace

extern "C" {

// out[r, o] = sum over i of x[r, i] * weight[o, i], + bias[o] unless null. Up to MAX_ROWS rows.
void pdserve_linear(const Linear* weight, const uint16_t* x, uint16_t* out, long rows,
                    int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int thread = 0; thread < threads; thread++)
        each_product(*weight, weight->outputs, nullptr, prepared(*weight, x, rows), rows, thread, threads,
                     [&](long channel, long channels, const float* sums, const char*) {
                         for (long r = 0; r < rows; r++)
                             for (long c = 0; c < channels; c += 16)
                                 store_bf16(out + r * weight->outputs + channel + c,
                                            _mm512_load_ps(sums + r * TILE + c));
                     });
}

// A whole weight as plain tiles; int8 without its scales.
void pdserve_widen(const Linear* weight, uint16_t* to, int threads) {
    if (weight->kind == INT8)
        widen<Int8>(weight->tiles, nullptr, to, weight->inputs, weight->outputs, threads);
    if (weight->kind == INT4)
        widen<Int4>(weight->tiles, weight->scales, to, weight->inputs, weight->outputs, threads);
}

// RMS norm of each row; size is a multiple of 16.
void pdserve_rms_norm(const uint16_t* x, const uint16_t* weight, uint16_t* out, long rows,
                      long size, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > MAX_ROWS)
    for (long r = 0; r < rows; r++) {
        const uint16_t* from = x + r * size;
        __m512 squares = _mm512_setzero_ps();
        for (long i = 0; i < size; i += 16) {
            __m512 value = load_bf16(from + i);
            squares = _mm512_fmadd_ps(value, value, squares);
        }
        __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(squares) / size + eps);
        __m512 factor = _mm512_div_ps(_mm512_set1_ps(1), _mm512_sqrt_ps(mean));
        for (long i = 0; i < size; i += 16) {
            __m512 value = _mm512_mul_ps(load_bf16(from + i), factor);
            store_bf16(out + r * size + i, _mm512_mul_ps(value, load_bf16(weight + i)));
        }
    }
}

// silu(gate) * up of each row [gate, up]; size, of one half, is a multiple of 16.
void pdserve_silu_mul(const uint16_t* gate_up, uint16_t* out, long rows, long size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > MAX_ROWS)
    for (long r = 0; r < rows; r++) {
        const uint16_t* gate = gate_up + 2 * r * size;
        for (long i = 0; i < size; i += 16)
            store_bf16(out + r * size + i,
                       _mm512_mul_ps(silu_ps(load_bf16(gate + i)), load_bf16(gate + size + i)));
    }
}

}  // extern "C"
