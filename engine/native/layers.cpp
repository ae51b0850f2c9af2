// All layers of a decoder for the tokens of one step in one call, whether they decode or are chunks
// of prompts. Between products of a few microseconds, calls of single operations cost as much as
// the products; between those of many rows, their threads would go to sleep.
//
// The threads of one parallel region walk through the layers together and wait for each other where
// one needs what others wrote. With few rows each has a fixed part of a product's channels; with
// many they take tiles and blocks of rows one by one, so that one that lost its core for a while
// holds up the others less, and offer some to hands (`hands.h`). The residual stream is float32,
// every product's input bfloat16.

#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "pieces.h"

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
    long rope;    // which of the decoder's
};

struct Rope {
    const float* frequencies;  // [rotary_dim / 2], angle per position
    float factor;              // on cos and sin
};

struct Decoder {
    const uint16_t* embedding;  // [vocabulary, hidden]
    Rope ropes[2];
    long num_ropes;
    const Layer* layers;
    long num_layers;
    long hidden, intermediate, heads, kv_heads, dim, rotary_dim;
    float eps, scale;
    const uint16_t* norm;
    Linear head;
    uint16_t* cache;  // [blocks, layers, 2, kv_heads, block_size, dim]
    long block_size;
};

// A product that comes after another one: `span` channels of it are shared out among the threads.
struct Ahead {
    const Linear* w = nullptr;
    long span = 0;
};

inline Ahead ahead_of(const Linear& w) { return {&w, w.outputs}; }

// Tokens of a prompt that go through attention together; others go alone.
struct PromptChunk {
    int64_t row, tokens, prefix, sequence;
};

struct Step {
    long rows;
    const int64_t* ids;         // [rows]
    const int64_t* positions;   // [rows]
    const int64_t* sequences;   // [rows], which of the tables
    const int64_t* tables;      // [sequences, table_stride]
    long table_stride;
    const PromptChunk* chunks;
    long num_chunks;
    const int64_t* singles;     // rows that are in no chunk
    long num_singles;
    const int64_t* logits_rows; // [num_logits]
    long num_logits;
    float* logits;              // [num_logits, vocabulary]
    float* best;                // [num_logits], the greatest of each row's ...
    int64_t* places;            // ... and the first place that has it
    // Of the caller, for one call at a time:
    float* residual;            // [rows, hidden]
    float* last_residual;       // [num_logits, hidden]
    uint16_t* turns;            // [ropes, rows, cos and sin, rotary_dim], see Walk::enter
    uint16_t* normed;           // [max(rows, threads * MAX_ROWS), hidden]
    uint16_t* qkv;              // [rows, (heads + 2 kv_heads) * dim]
    uint16_t* attended;         // [rows, heads * dim]
    uint16_t* activated;        // [rows, intermediate]
};

// Keys that are worth a part of their own, and pairs of rows and KV heads for each thread from which
// on nothing needs to be cut.
constexpr long PART_KEYS = 128, ENOUGH_PAIRS = 4;

// Whether the threads of this process's team have a core each, see `pdserve_settle`.
bool are_settled = false;

// The threads of a call: where they wait for each other, and what of a phase is left to take.
class Crew {
   public:
    int threads = 1;

    // The next piece of this phase.
    long take() { return next_.fetch_add(1, std::memory_order_relaxed); }

    // Ends a phase. Spins, then lets others run: the last thread may be off its core.
    void wait() {
        int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        // Settled threads need not let each other run, and what wakes up beside them does so anyway.
        // One that yields puts itself back by a whole slice, the long one that it has, behind
        // threads of the lowest priority too; from sleep it takes its core back at once.
        long patience = are_settled ? 100'000 : 2000;
        for (long spins = 0; round_.load(std::memory_order_acquire) == round; spins++)
            if (spins < patience)
                _mm_pause();
            else if (are_settled)
                usleep(20);
            else
                sched_yield();
    }

   private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
    alignas(64) std::atomic<long> next_{0};
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

// The greatest of some of a row's numbers and the first place that has it. NaN counts as greatest.
struct Maximum {
    float value = -INFINITY;
    int64_t place = INT64_MAX;

    void meet(const Maximum& other) {
        bool is_equal = other.value == value || (isnan(other.value) && isnan(value));
        bool is_greater = other.value > value || (isnan(other.value) && !isnan(value));
        if (is_greater || (is_equal && other.place < place)) *this = other;
    }
};

// Of the places [first, end), a multiple of 16 of them.
Maximum maximum_of(const float* row, long first, long end) {
    Maximum found;
    if (first == end) return found;
    __m512 most = _mm512_loadu_ps(row + first);
    __m512i at = _mm512_set1_epi32(0);  // of each lane, in vectors from the first on
    __mmask16 nan = _mm512_cmp_ps_mask(most, most, _CMP_UNORD_Q);
    for (long i = first + 16; i < end; i += 16) {
        __m512 x = _mm512_loadu_ps(row + i);
        __mmask16 greater = _mm512_cmp_ps_mask(x, most, _CMP_GT_OQ);
        most = _mm512_mask_mov_ps(most, greater, x);
        at = _mm512_mask_mov_epi32(at, greater, _mm512_set1_epi32((i - first) / 16));
        nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    }
    if (nan) {
        for (long i = first; i < end; i++) found.meet({row[i], i});
        return found;
    }
    alignas(64) float values[16];
    alignas(64) int32_t vectors[16];
    _mm512_store_ps(values, most);
    _mm512_store_si512(vectors, at);
    for (long lane = 0; lane < 16; lane++)
        found.meet({values[lane], first + 16 * vectors[lane] + lane});
    return found;
}

// Into how many parts the keys of single rows are cut, so that few long sequences are work for all
// threads, and where what is seen of each part is kept.
struct SingleRoom {
    long parts;
    Seen* room;
};

class Walk {
   public:
    Walk(const Decoder& d, const Step& s, int thread, Crew& crew, Hand* hand, long few_rows,
         uint16_t* packed, SingleRoom seen, Maximum* maxima)
        : d_(d), s_(s), thread_(thread), crew_(crew), hand_(hand), few_rows_(few_rows),
          packed_(packed), seen_(seen), maxima_(maxima), rows_(s.rows),
          residual_(s.residual), attended_(s.attended),
          width_((d.heads + 2 * d.kv_heads) * d.dim) {}

    void run() {
        share(rows_, [&](long r) { enter(r); });
        crew_.wait();
        for (long i = 0; i < d_.num_layers; i++) layer(d_.layers[i], i);
        logits();
    }

   private:
    uint16_t* turn_of(long rope, long r) {
        return s_.turns + (rope * s_.rows + r) * 2 * d_.rotary_dim;
    }

    // What goes into the first layer. Of cos and sin both halves, the first of sin negated.
    void enter(long r) {
        const uint16_t* embedded = d_.embedding + s_.ids[r] * d_.hidden;
        for (long i = 0; i < d_.hidden; i += 16)
            _mm512_storeu_ps(residual_ + r * d_.hidden + i, load_bf16(embedded + i));
        long half = d_.rotary_dim / 2;
        alignas(64) float cos[MAX_DIM / 2], sin[MAX_DIM / 2];
        for (long k = 0; k < d_.num_ropes; k++) {
            for (long i = 0; i < half; i++) {
                float angle = s_.positions[r] * d_.ropes[k].frequencies[i];
                cos[i] = cosf(angle) * d_.ropes[k].factor;
                sin[i] = sinf(angle) * d_.ropes[k].factor;
            }
            uint16_t* to = turn_of(k, r);
            for (long i = 0; i < half; i += 16) {
                __m512 c = _mm512_load_ps(cos + i), s = _mm512_load_ps(sin + i);
                store_bf16(to + i, c);
                store_bf16(to + half + i, c);
                store_bf16(to + 2 * half + i, _mm512_sub_ps(_mm512_setzero_ps(), s));
                store_bf16(to + 3 * half + i, s);
            }
        }
    }

    template <class Use>
    void share(long items, Use use) {
        long threads = crew_.threads;
        for (long i = items * thread_ / threads; i < items * (thread_ + 1) / threads; i++) use(i);
    }

    // All pieces of a phase: make(i) is one, as in `pieces.h`. A hand that does not end its last one
    // in twice the time that one takes here has lost its core.
    template <class Make>
    void take(long pieces, Make make) {
        uint64_t shortest = UINT64_MAX;
        if (hand_) hand_->keep_off();
        for (long i; (i = crew_.take()) < pieces;) {
            if (hand_) offer(pieces, make);
            uint64_t start = __rdtsc();
            make(i).run();
            uint64_t ticks = __rdtsc() - start;
            if (ticks < shortest) shortest = ticks;
            if (hand_) hand_->adopt_done();
        }
        if (hand_ && shortest != UINT64_MAX) hand_->take_back(2 * shortest);
    }

    template <class Make>
    void offer(long pieces, Make make) {
        for (long i; hand_->has_room() && (i = crew_.take()) < pieces;) hand_->offer(make(i));
    }

    // Few rows each thread norms for itself: less than waiting for another.
    const uint16_t* norm(const uint16_t* weight) {
        bool is_own = rows_ <= few_rows_;
        uint16_t* out = s_.normed + (is_own ? thread_ * MAX_ROWS * d_.hidden : 0);
        auto row = [&](long r) {
            norm_row(residual_ + r * d_.hidden, weight, out + r * d_.hidden, d_.hidden, d_.eps);
        };
        if (is_own) {
            for (long r = 0; r < rows_; r++) row(r);
        } else {
            share(rows_, row);
            crew_.wait();
        }
        return out;
    }

    // Few rows of x times the first `span` channels: calls use(channel, channels, sums [rows, TILE],
    // next) for this thread's part, see `each_product`.
    template <class Use>
    void few(const Linear& w, long span, const Ahead& ahead, const uint16_t* x, Use use) {
        each_product(w, span, first_tile(ahead), prepared(w, x, rows_), rows_, thread_,
                     crew_.threads, use);
    }

    // Of this thread's share.
    const char* first_tile(const Ahead& ahead) const {
        if (!ahead.w) return nullptr;
        return tile_of(*ahead.w, Share(ahead.span, thread_, crew_.threads).at * HALF);
    }

    // Many rows of x times the first `span` channels: make(block) is the work of one.
    template <class Make>
    void blocks(const Linear& w, long span, const uint16_t* x, Make make) {
        long count = (rows_ + BLOCK_ROWS - 1) / BLOCK_ROWS;
        take(span / TILE * count, [&](long i) {
            long first = i % count * BLOCK_ROWS, last = first + BLOCK_ROWS;
            return make(Block{&w, x, i / count * TILE, first, last < rows_ ? last : rows_});
        });
    }

    void narrow(const Linear& w, const Ahead& ahead, const uint16_t* x, uint16_t* out) {
        if (rows_ <= few_rows_)
            few(w, w.outputs, ahead, x,
                [&](long channel, long channels, const float* sums, const char*) {
                    put_narrow(sums, rows_, channels, out + channel, w.outputs);
                });
        else
            blocks(w, w.outputs, x, [&](const Block& block) {
                return NarrowBlock<Product>{block, out, w.outputs};
            });
        crew_.wait();
    }

    // Adds to the residual.
    void add(const Linear& w, const Ahead& ahead, const uint16_t* x) {
        if (rows_ <= few_rows_)
            few(w, w.outputs, ahead, x,
                [&](long channel, long channels, const float* sums, const char*) {
                    put_wide(sums, rows_, channels, residual_ + channel, d_.hidden, true);
                });
        else
            blocks(w, w.outputs, x, [&](const Block& block) {
                return WideBlock{block, residual_, d_.hidden, true};
            });
        crew_.wait();
    }

    void layer(const Layer& layer, long index) {
        bool is_last = index == d_.num_layers - 1;
        const Linear& behind = is_last ? d_.head : d_.layers[index + 1].qkv;
        narrow(layer.qkv, ahead_of(layer.o), norm(layer.input_norm), s_.qkv);
        LayerCache cache{d_.cache + index * 2 * d_.kv_heads * d_.block_size * d_.dim,
                         d_.num_layers * 2 * d_.kv_heads * d_.block_size * d_.dim, d_.kv_heads,
                         d_.block_size, d_.dim};
        turn(layer, cache);
        attention(layer, cache);
        if (is_last && s_.num_logits < rows_) keep_logits_rows();
        add(layer.o, {&layer.gate_up, d_.intermediate}, attended_);
        gate_up(layer.gate_up, ahead_of(layer.down), norm(layer.mlp_norm));
        add(layer.down, ahead_of(behind), s_.activated);
    }

    // Rotates queries and keys and writes the rows' keys and values.
    void turn(const Layer& layer, const LayerCache& cache) {
        share(rows_ * (d_.heads + d_.kv_heads), [&](long item) {
            long r = item / (d_.heads + d_.kv_heads), head = item % (d_.heads + d_.kv_heads);
            uint16_t* at = s_.qkv + r * width_ + head * d_.dim;
            bool is_key = head >= d_.heads;
            const uint16_t* cos = turn_of(layer.rope, r);
            turn_head(at, is_key ? layer.k_norm : layer.q_norm, cos, cos + d_.rotary_dim, d_);
            if (!is_key) return;
            long kv_head = head - d_.heads, position = s_.positions[r];
            int64_t block = table(s_.sequences[r])[position / d_.block_size];
            long slot = position % d_.block_size * d_.dim, bytes = d_.dim * sizeof(uint16_t);
            memcpy(cache.keys(block, kv_head) + slot, at, bytes);
            memcpy(cache.values(block, kv_head) + slot, at + d_.kv_heads * d_.dim, bytes);
        });
        crew_.wait();
    }

    const int64_t* table(long sequence) const { return s_.tables + sequence * s_.table_stride; }

    void attention(const Layer& layer, const LayerCache& cache) {
        std::vector<ChunkWork> chunks;
        uint16_t* packed = packed_;
        for (long i = 0; i < s_.num_chunks; i++) {
            const PromptChunk& c = s_.chunks[i];
            Queries queries{s_.qkv + c.row * width_, width_, attended_ + c.row * d_.heads * d_.dim,
                            d_.heads * d_.dim, c.tokens, c.prefix, d_.heads, layer.window,
                            d_.scale};
            chunks.emplace_back(cache, table(c.sequence), queries, packed);
            packed += ChunkWork::packed_size(cache, 0, c.prefix + c.tokens);
            share(chunks[i].num_packs(), [&](long item) { chunks[i].pack(item); });
        }
        if (s_.num_chunks) crew_.wait();
        // A thread takes whole sequences where it can: heads of a block share its pages.
        share(s_.num_singles * d_.kv_heads * seen_.parts, [&](long item) {
            attend_single(layer, cache, item / seen_.parts, item % seen_.parts);
        });
        long pieces = 0;
        for (ChunkWork& chunk : chunks) pieces += chunk.num_pieces();
        take(pieces, [&](long piece) {
            ChunkWork* chunk = chunks.data();
            for (; piece >= chunk->num_pieces(); chunk++) piece -= chunk->num_pieces();
            return AttentionPiece{*chunk, piece};
        });
        crew_.wait();
        if (seen_.parts == 1) return;
        share(s_.num_singles * d_.kv_heads, [&](long pair) { join_single(pair); });
        crew_.wait();
    }

    // One KV head of one row, both in `pair`, over one part of its keys.
    void attend_single(const Layer& layer, const LayerCache& cache, long pair, long part) {
        long r = s_.singles[pair / d_.kv_heads], head = pair % d_.kv_heads;
        long group = d_.heads / d_.kv_heads, len = s_.positions[r] + 1;
        long first = layer.window && len > layer.window ? len - layer.window : 0;
        long size = (len - first + seen_.parts - 1) / seen_.parts;
        long from = first + part * size, end = from + size < len ? from + size : len;
        Seen* seen = seen_of(pair, part);
        if (from < end)
            attend_head(s_.qkv + r * width_ + head * group * d_.dim, group, cache, head,
                        table(s_.sequences[r]), from, end, d_.scale, seen);
        else
            for (long g = 0; g < group; g++) seen[g] = {-INFINITY, 0, {}};
        if (seen_.parts == 1) join_single(pair);
    }

    void join_single(long pair) {
        long r = s_.singles[pair / d_.kv_heads], head = pair % d_.kv_heads;
        long group = d_.heads / d_.kv_heads;
        for (long g = 0; g < group; g++)
            join(seen_of(pair, 0) + g, seen_.parts, group, d_.dim,
                 attended_ + (r * d_.heads + head * group + g) * d_.dim);
    }

    // [heads of a KV head]. With one part each thread has one place, which is joined at once.
    Seen* seen_of(long pair, long part) {
        long group = d_.heads / d_.kv_heads;
        return seen_.room + (seen_.parts == 1 ? thread_ : pair * seen_.parts + part) * group;
    }

    // All keys and values are written: from here on only the rows matter that end in logits.
    void keep_logits_rows() {
        long size = d_.heads * d_.dim;
        share(s_.num_logits, [&](long i) {
            long r = s_.logits_rows[i];
            memcpy(s_.last_residual + i * d_.hidden, residual_ + r * d_.hidden,
                   d_.hidden * sizeof(float));
            memcpy(s_.qkv + i * size, attended_ + r * size, size * sizeof(uint16_t));
        });
        crew_.wait();
        rows_ = s_.num_logits;
        residual_ = s_.last_residual;
        attended_ = s_.qkv;
        are_logits_rows_ = true;
    }

    void gate_up(const Linear& w, const Ahead& ahead, const uint16_t* x) {
        if (rows_ <= few_rows_) {
            alignas(64) float up[MAX_ROWS * TILE];
            Inputs inputs = prepared(w, x, rows_);
            const char* after = first_tile(ahead);
            auto use = [&](long channel, long channels, const float* gate, const char* next) {
                long other = d_.intermediate + channel;
                next += (next == after ? TILE : d_.intermediate) * w.inputs * 2;
                if (channels == TILE)
                    pdserve::product<4>(w, other, next, inputs, rows_, up);
                else
                    pdserve::product<2>(w, other, next, inputs, rows_, up);
                activate(gate, up, rows_, channels, s_.activated + channel, d_.intermediate);
            };
            each_product(w, d_.intermediate, after, inputs, rows_, thread_, crew_.threads, use);
        } else {
            blocks(w, d_.intermediate, x, [&](const Block& block) {
                return NarrowBlock<GateUp>{block, s_.activated, d_.intermediate};
            });
        }
        crew_.wait();
    }

    void logits() {
        if (!are_logits_rows_) keep_logits_rows();
        long size = d_.head.outputs;
        const uint16_t* x = norm(d_.norm);
        if (rows_ <= few_rows_)
            few(d_.head, size, {}, x,
                [&](long channel, long channels, const float* sums, const char*) {
                    put_wide(sums, rows_, channels, s_.logits + channel, size, false);
                });
        else {
            blocks(d_.head, size, x, [&](const Block& block) {
                return WideBlock{block, s_.logits, size, false};
            });
            crew_.wait();
        }
        find_maxima(size);
    }

    // Each thread looks through the channels that it has made itself, if there are few rows.
    void find_maxima(long size) {
        long threads = crew_.threads, halves = size / HALF;
        long first = halves * thread_ / threads * HALF;
        long end = halves * (thread_ + 1) / threads * HALF;
        for (long r = 0; r < rows_; r++)
            maxima_[r * threads + thread_] = maximum_of(s_.logits + r * size, first, end);
        crew_.wait();
        share(rows_, [&](long r) {
            Maximum found;
            for (long t = 0; t < threads; t++) found.meet(maxima_[r * threads + t]);
            s_.best[r] = found.value;
            s_.places[r] = found.place;
        });
    }

    const Decoder& d_;
    const Step& s_;
    int thread_;
    Crew& crew_;
    Hand* hand_;        // of this thread, or null
    long few_rows_;     // up to which each thread has a fixed part of a product
    uint16_t* packed_;  // room for the chunks' keys and values of one layer
    SingleRoom seen_;
    Maximum* maxima_;   // [num_logits, threads]
    long rows_;
    float* residual_;
    uint16_t* attended_;
    long width_;
    bool are_logits_rows_ = false;
};

// Memory that hands read. What was outgrown stays while one of them may still do so.
class Room {
   public:
    ~Room() { Hands::await_all(); }
    uint16_t* of(size_t size) {
        if (size > room_.capacity()) {
            if (Hands::are_back())
                outgrown_.clear();
            else
                outgrown_.push_back(std::move(room_));
            room_ = {};
        }
        room_.resize(size);
        return room_.data();
    }

   private:
    std::vector<uint16_t> room_;
    std::vector<std::vector<uint16_t>> outgrown_;
};

// Of all chunks in a layer without a window.
uint16_t* room_for_packed(const Decoder& d, const Step& s) {
    static thread_local Room packed;
    LayerCache cache{d.cache, 0, d.kv_heads, d.block_size, d.dim};
    long size = 0;
    for (long i = 0; i < s.num_chunks; i++)
        size += ChunkWork::packed_size(cache, 0, s.chunks[i].prefix + s.chunks[i].tokens);
    return packed.of(size);
}

// Linux lets a thread of the usual policy run to the end of its slice, some 3 ms, before another
// that wakes up has its turn, unless that one's slice is shorter. A token has five such wake-ups to
// go through on its way to the client. So a long slice: its share of the processor stays the same.
// Only on a core of its own: two such threads on one would take turns of 100 ms. Kernels before
// 6.12 have one slice for all, and ignore it.
void give_way() {
    struct {  // sched_attr of the kernel
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attributes = {};
    attributes.size = sizeof attributes;
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0)) return;
    if (attributes.policy != SCHED_OTHER) return;
    attributes.runtime = 100'000'000;  // ns, the longest
    syscall(SYS_sched_setattr, 0, &attributes, 0);
}

SingleRoom room_for_singles(const Decoder& d, const Step& s, int threads) {
    static thread_local std::vector<Seen> room;
    long pairs = s.num_singles * d.kv_heads, parts = 1, longest = 0;
    for (long i = 0; i < s.num_singles; i++)
        if (s.positions[s.singles[i]] > longest) longest = s.positions[s.singles[i]];
    if (pairs < ENOUGH_PAIRS * threads && threads > 1) parts = longest / PART_KEYS;
    parts = parts < 1 ? 1 : parts > threads ? threads : parts;
    room.resize((parts == 1 ? threads : pairs * parts) * (d.heads / d.kv_heads));
    return {parts, room.data()};
}

}  // namespace

extern "C" {

// From now on the calling thread and its team have a core each, and give way at once to whatever
// wakes up on it. What fails leaves them as they were.
void pdserve_settle(const int* cpus, int threads) {
    are_settled = true;
#pragma omp parallel num_threads(threads)
    {
        give_way();
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(cpus[omp_get_thread_num()], &own);
        sched_setaffinity(0, sizeof own, &own);
    }
}

// Up to `few_rows`, at most MAX_ROWS, each thread has a fixed part of a product; with more, each of
// the first `hands` threads has a hand beside it.
void pdserve_layers(const Decoder* decoder, const Step* step, int threads, int hands,
                    int few_rows) {
    Crew crew;
    uint16_t* packed = room_for_packed(*decoder, *step);
    SingleRoom seen = room_for_singles(*decoder, *step, threads);
    static thread_local std::vector<Maximum> maxima;
    maxima.resize(step->num_logits * threads);
    Maximum* room = maxima.data();
    Hands own(step->rows > few_rows ? hands : 0);
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        crew.threads = omp_get_num_threads();  // may be fewer than asked for
        int thread = omp_get_thread_num();
        Walk(*decoder, *step, thread, crew, own.get(thread), few_rows, packed, seen,
             room).run();
    }
}

// Whether no hand has work any more, that of ended calls included, after at most a second.
int pdserve_await_hands() { return Hands::await_all(); }

// Pieces that hands did, and that were taken from them again, in this process.
void pdserve_hand_counts(long* adopted, long* given_up) {
    *adopted = hand_counts.adopted.load();
    *given_up = hand_counts.given_up.load();
}

}  // extern "C"
