// What threads take piece by piece in a step of many rows: blocks of a product and pieces of a
// prompt's attention, each as work that a hand can be offered.

#pragma once

#include "chunk.h"
#include "hands.h"

namespace pdserve {

// A tile of channels of a product with a block of the rows of x [rows, inputs].
struct Block {
    const Linear* w;
    const uint16_t* x;
    long channel, first, last;

    long rows() const { return last - first; }
};

inline uint16_t* scratch_tile(int which, const Linear& w) {
    static thread_local std::vector<uint16_t> wide[2];
    if (w.kind != PLAIN) wide[which].resize(w.inputs * TILE);
    return wide[which].data();
}

// Calls use(row, rows, sums [rows, TILE]) for a few rows of the block at a time, counted from its
// first.
template <class Use>
void each_group(const Block& b, Use use) {
    alignas(64) float sums[GROUP_ROWS * TILE];
    const uint16_t* tile = plain_tile(*b.w, b.channel, scratch_tile(0, *b.w));
    for (long r = 0; r < b.rows(); r += GROUP_ROWS) {
        long rows = b.rows() - r < GROUP_ROWS ? b.rows() - r : GROUP_ROWS;
        group_product(*b.w, b.channel, tile, b.x + (b.first + r) * b.w->inputs, rows, sums);
        use(r, rows, sums);
    }
}

// Sums [rows, TILE] of some channels as bfloat16, in rows `stride` apart.
inline void put_narrow(const float* sums, long rows, long channels, uint16_t* to, long stride) {
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < channels; c += 16)
            store_bf16(to + r * stride + c, _mm512_load_ps(sums + r * TILE + c));
}

// The same as float32: added to what is there, or written.
inline void put_wide(const float* sums, long rows, long channels, float* to, long stride,
                     bool is_added) {
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < channels; c += 16) {
            float* at = to + r * stride + c;
            __m512 sum = _mm512_load_ps(sums + r * TILE + c);
            _mm512_storeu_ps(at, is_added ? _mm512_add_ps(_mm512_loadu_ps(at), sum) : sum);
        }
}

// A block whose result is bfloat16, in rows `stride` apart, written to `to` by Made::make.
template <class Made>
struct NarrowBlock {
    Block block;
    uint16_t* out;  // of the whole product [rows, stride]
    long stride;

    uint16_t* place() const { return out + block.first * stride + block.channel; }
    void run() const { Made::make(*this, place(), stride); }
    void compute(Result& result) const { Made::make(*this, result.narrow, TILE); }
    void adopt(const Result& result) const {
        for (long r = 0; r < block.rows(); r++)
            memcpy(place() + r * stride, result.narrow + r * TILE, TILE * sizeof(uint16_t));
    }
};

struct Product {
    static void make(const NarrowBlock<Product>& n, uint16_t* to, long stride) {
        each_group(n.block, [&](long row, long rows, const float* sums) {
            put_narrow(sums, rows, TILE, to + row * stride, stride);
        });
    }
};

// silu(gate) * up of `rows` rows and `channels` channels.
inline void activate(const float* gate, const float* up, long rows, long channels, uint16_t* to,
                     long stride) {
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < channels; c += 16) {
            __m512 silu = silu_ps(_mm512_load_ps(gate + r * TILE + c));
            store_bf16(to + r * stride + c,
                       _mm512_mul_ps(silu, _mm512_load_ps(up + r * TILE + c)));
        }
}

// Of a weight that is a gate's channels, then as many of what it lets through.
struct GateUp {
    static void make(const NarrowBlock<GateUp>& n, uint16_t* to, long stride) {
        const Block& b = n.block;
        alignas(64) float up[GROUP_ROWS * TILE];
        long other = b.w->outputs / 2 + b.channel;
        const uint16_t* up_tile = plain_tile(*b.w, other, scratch_tile(1, *b.w));
        each_group(b, [&](long row, long rows, const float* gate) {
            const uint16_t* x = b.x + (b.first + row) * b.w->inputs;
            group_product(*b.w, other, up_tile, x, rows, up);
            activate(gate, up, rows, TILE, to + row * stride, stride);
        });
    }
};

// A block whose sums stay float32: added to `out` [rows, stride], or written there.
struct WideBlock {
    Block block;
    float* out;
    long stride;
    bool is_added;

    void run() const {
        each_group(block, [&](long row, long rows, const float* sums) { put(row, rows, sums); });
    }
    void compute(Result& result) const {
        each_group(block, [&](long row, long rows, const float* sums) {
            memcpy(result.sums + row * TILE, sums, rows * TILE * sizeof(float));
        });
    }
    void adopt(const Result& result) const { put(0, block.rows(), result.sums); }

    void put(long row, long rows, const float* sums) const {
        float* to = out + (block.first + row) * stride + block.channel;
        put_wide(sums, rows, TILE, to, stride, is_added);
    }
};

struct AttentionPiece {
    ChunkWork chunk;
    long piece;

    void run() const { chunk.attend(piece); }
    void compute(Result& result) const {
        chunk.attend(piece, result.narrow, chunk.place(piece).size);
    }
    void adopt(const Result& result) const {
        ChunkWork::Place at = chunk.place(piece);
        for (long t = 0; t < at.tokens; t++)
            memcpy(at.out + t * chunk.out_stride(), result.narrow + t * at.size,
                   at.size * sizeof(uint16_t));
    }
    // Groups of very many heads have no place in a result.
    bool fits() const {
        ChunkWork::Place at = chunk.place(piece);
        return at.tokens * at.size <= BLOCK_ROWS * TILE;
    }
};

}  // namespace pdserve
