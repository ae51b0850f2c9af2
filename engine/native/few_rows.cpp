// All layers of a decoder for a few tokens in one call: what decoding spends its time on. Between
// products of a few microseconds, calls of single operations cost as much as the products.
//
// The threads of one parallel region walk through the layers together and wait for each other where
// one needs what others wrote. The residual stream is float32, every product's input bfloat16.

#include <omp.h>
#include <sched.h>

#include <atomic>

#include "attention.h"

using namespace pdserve;

namespace {

struct Layer {
    const uint16_t* input_norm;
    Linear qkv;
    const uint16_t *q_norm, *k_norm;  // [dim] or null
    Linear o;
    const uint16_t* mlp_norm;
    Linear gate_up, down;
    long window;  // 0: none
    long rope;    // which of the tables of cos and sin
};

struct Decoder {
    const Layer* layers;
    long num_layers;
    long hidden, intermediate, heads, kv_heads, dim, rotary_dim;
    float eps, scale;
    const uint16_t* norm;
    Linear head;
    uint16_t* cache;  // [blocks, layers, 2, kv_heads, block_size, dim]
    long block_size;
};

struct Step {
    long rows;
    const uint16_t* embedded;   // [rows, hidden]
    const uint16_t* cos[2];     // [rows, rotary_dim]
    const uint16_t* sin[2];     // the first half negated
    const int64_t* tables;      // [rows, table_stride]
    long table_stride;
    const int64_t* lens;        // [rows], the row's own token included
    const int64_t* logits_rows; // [num_logits]
    long num_logits;
    float* logits;              // [num_logits, vocabulary]
    // Of the caller, for one call at a time:
    float* residual;            // [rows, hidden]
    uint16_t* normed;           // [threads, rows, hidden]
    uint16_t* qkv;              // [rows, (heads + 2 kv_heads) * dim]
    uint16_t* attended;         // [rows, heads * dim]
    uint16_t* activated;        // [rows, intermediate]
};

// Spins, then lets others run: the last thread may be off its core.
class Barrier {
   public:
    int threads = 1;
    void wait() {
        if (threads == 1) return;
        int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++)
            spins < 2000 ? _mm_pause() : static_cast<void>(sched_yield());
    }

   private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
};

float root_of_mean(__m512 squares, long size, float eps) {
    return 1.f / sqrtf(_mm512_reduce_add_ps(squares) / size + eps);
}

void norm_row(const float* x, const uint16_t* weight, uint16_t* out, long size, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < size; i += 16) {
        __m512 value = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    __m512 factor = _mm512_set1_ps(root_of_mean(squares, size, eps));
    for (long i = 0; i < size; i += 16) {
        __m512 value = _mm512_mul_ps(_mm512_loadu_ps(x + i), factor);
        store_bf16(out + i, _mm512_mul_ps(value, load_bf16(weight + i)));
    }
}

// Norm, if there is one, then rotation, of one head in place.
void turn_head(uint16_t* head, const uint16_t* norm, const uint16_t* cos, const uint16_t* sin,
               const Decoder& d) {
    alignas(64) float x[MAX_DIM];
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < d.dim; i += 16) {
        __m512 value = load_bf16(head + i);
        squares = _mm512_fmadd_ps(value, value, squares);
        _mm512_store_ps(x + i, value);
    }
    if (norm) {
        __m512 factor = _mm512_set1_ps(root_of_mean(squares, d.dim, d.eps));
        for (long i = 0; i < d.dim; i += 16) {
            __m512 value = _mm512_mul_ps(_mm512_load_ps(x + i), factor);
            _mm512_store_ps(x + i, _mm512_mul_ps(value, load_bf16(norm + i)));
        }
    }
    long half = d.rotary_dim / 2;
    for (long i = 0; i < half; i += 16) {
        __m512 a = _mm512_load_ps(x + i), b = _mm512_loadu_ps(x + half + i);
        __m512 first = _mm512_fmadd_ps(b, load_bf16(sin + i),
                                       _mm512_mul_ps(a, load_bf16(cos + i)));
        __m512 second = _mm512_fmadd_ps(a, load_bf16(sin + half + i),
                                        _mm512_mul_ps(b, load_bf16(cos + half + i)));
        store_bf16(head + i, first);
        store_bf16(head + half + i, second);
    }
    if (norm)
        for (long i = d.rotary_dim; i < d.dim; i += 16) store_bf16(head + i, _mm512_load_ps(x + i));
}

class Walk {
   public:
    Walk(const Decoder& d, const Step& s, int thread, int threads, Barrier& barrier)
        : d_(d), s_(s), thread_(thread), threads_(threads), barrier_(barrier),
          normed_(s.normed + thread * s.rows * d.hidden) {}

    void run() {
        share(s_.rows, [&](long r) {
            for (long i = 0; i < d_.hidden; i += 16)
                _mm512_storeu_ps(s_.residual + r * d_.hidden + i,
                                 load_bf16(s_.embedded + r * d_.hidden + i));
        });
        barrier_.wait();
        for (long i = 0; i < d_.num_layers; i++) layer(d_.layers[i], i);
        logits();
    }

   private:
    template <class Use>
    void share(long items, Use use) {
        for (long i = items * thread_ / threads_; i < items * (thread_ + 1) / threads_; i++) use(i);
    }

    // Every thread norms all rows for itself: less than waiting for another.
    void norm(const uint16_t* weight) {
        for (long r = 0; r < s_.rows; r++)
            norm_row(s_.residual + r * d_.hidden, weight, normed_ + r * d_.hidden, d_.hidden,
                     d_.eps);
    }

    void narrow(const Linear& w, const uint16_t* x, uint16_t* out) {
        each_product(w, w.outputs, x, s_.rows, thread_, threads_,
                     [&](long channel, long channels, const float* sums) {
                         for (long r = 0; r < s_.rows; r++)
                             for (long c = 0; c < channels; c += 16)
                                 store_bf16(out + r * w.outputs + channel + c,
                                            _mm512_load_ps(sums + r * TILE + c));
                     });
        barrier_.wait();
    }

    void add(const Linear& w, const uint16_t* x) {
        each_product(w, w.outputs, x, s_.rows, thread_, threads_,
                     [&](long channel, long channels, const float* sums) {
                         for (long r = 0; r < s_.rows; r++)
                             for (long c = 0; c < channels; c += 16) {
                                 float* to = s_.residual + r * d_.hidden + channel + c;
                                 _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to),
                                                  _mm512_load_ps(sums + r * TILE + c)));
                             }
                     });
        barrier_.wait();
    }

    void layer(const Layer& layer, long index) {
        norm(layer.input_norm);
        narrow(layer.qkv, normed_, s_.qkv);
        LayerCache cache{d_.cache + index * 2 * d_.kv_heads * d_.block_size * d_.dim,
                         d_.num_layers * 2 * d_.kv_heads * d_.block_size * d_.dim, d_.kv_heads,
                         d_.block_size, d_.dim};
        turn(layer, cache);
        attention(layer, cache);
        add(layer.o, s_.attended);
        norm(layer.mlp_norm);
        gate_up(layer.gate_up);
        add(layer.down, s_.activated);
    }

    // Rotates queries and keys and writes the rows' keys and values.
    void turn(const Layer& layer, const LayerCache& cache) {
        const uint16_t *cos = s_.cos[layer.rope], *sin = s_.sin[layer.rope];
        long width = (d_.heads + 2 * d_.kv_heads) * d_.dim;
        share(s_.rows * (d_.heads + d_.kv_heads), [&](long item) {
            long r = item / (d_.heads + d_.kv_heads), head = item % (d_.heads + d_.kv_heads);
            uint16_t* at = s_.qkv + r * width + head * d_.dim;
            bool is_key = head >= d_.heads;
            turn_head(at, is_key ? layer.k_norm : layer.q_norm, cos + r * d_.rotary_dim,
                      sin + r * d_.rotary_dim, d_);
            if (!is_key) return;
            long kv_head = head - d_.heads, position = s_.lens[r] - 1;
            int64_t block = s_.tables[r * s_.table_stride + position / d_.block_size];
            long slot = position % d_.block_size * d_.dim, bytes = d_.dim * sizeof(uint16_t);
            memcpy(cache.keys(block, kv_head) + slot, at, bytes);
            memcpy(cache.values(block, kv_head) + slot, at + d_.kv_heads * d_.dim, bytes);
        });
        barrier_.wait();
    }

    void attention(const Layer& layer, const LayerCache& cache) {
        long group = d_.heads / d_.kv_heads;
        long width = (d_.heads + 2 * d_.kv_heads) * d_.dim;
        share(s_.rows * d_.kv_heads, [&](long item) {
            long r = item / d_.kv_heads, head = item % d_.kv_heads;
            long len = s_.lens[r];
            long first = layer.window && len > layer.window ? len - layer.window : 0;
            attend_head(s_.qkv + r * width + head * group * d_.dim, group, cache, head,
                        s_.tables + r * s_.table_stride, first, len, d_.scale,
                        s_.attended + (r * d_.heads + head * group) * d_.dim);
        });
        barrier_.wait();
    }

    void gate_up(const Linear& w) {
        alignas(64) float up[MAX_ROWS * TILE];
        each_product(w, d_.intermediate, normed_, s_.rows, thread_, threads_,
                     [&](long channel, long channels, const float* gate) {
                         long other = d_.intermediate + channel;
                         if (channels == TILE)
                             product<4>(w, other, normed_, s_.rows, up);
                         else
                             product<2>(w, other, normed_, s_.rows, up);
                         for (long r = 0; r < s_.rows; r++)
                             for (long c = 0; c < channels; c += 16) {
                                 __m512 silu = silu_ps(_mm512_load_ps(gate + r * TILE + c));
                                 store_bf16(s_.activated + r * d_.intermediate + channel + c,
                                            _mm512_mul_ps(silu,
                                                          _mm512_load_ps(up + r * TILE + c)));
                             }
                     });
        barrier_.wait();
    }

    void logits() {
        for (long i = 0; i < s_.num_logits; i++)
            norm_row(s_.residual + s_.logits_rows[i] * d_.hidden, d_.norm,
                     normed_ + i * d_.hidden, d_.hidden, d_.eps);
        each_product(d_.head, d_.head.outputs, normed_, s_.num_logits, thread_, threads_,
                     [&](long channel, long channels, const float* sums) {
                         for (long r = 0; r < s_.num_logits; r++)
                             for (long c = 0; c < channels; c += 16)
                                 _mm512_storeu_ps(s_.logits + r * d_.head.outputs + channel + c,
                                                  _mm512_load_ps(sums + r * TILE + c));
                     });
    }

    const Decoder& d_;
    const Step& s_;
    int thread_, threads_;
    Barrier& barrier_;
    uint16_t* normed_;
};

}  // namespace

extern "C" void pdserve_few_rows(const Decoder* decoder, const Step* step, int threads) {
    Barrier barrier;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        barrier.threads = omp_get_num_threads();  // may be fewer than asked for
        Walk(*decoder, *step, omp_get_thread_num(), barrier.threads, barrier).run();
    }
}
