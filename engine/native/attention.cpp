// Attention over a paged cache: of single tokens that decode, and of a prompt chunk.

#include <vector>

#include "chunk.h"

using namespace pdserve;

extern "C" {

// One query token a sequence: query [sequences, heads, dim] with rows `query_stride` apart, tables
// [sequences, table_stride], lens with the query's own token, out [sequences, heads, dim].
void pdserve_decode_attention(const LayerCache* cache, const uint16_t* query, long query_stride,
                              const int64_t* tables, long table_stride, const int64_t* lens,
                              uint16_t* out, long sequences, long heads, long window, float scale,
                              int threads) {
    long group = heads / cache->kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
    for (long s = 0; s < sequences; s++)
        for (long head = 0; head < cache->kv_heads; head++) {
            static thread_local std::vector<Seen> seen;
            seen.resize(group);
            long first = window && lens[s] > window ? lens[s] - window : 0;
            attend_head(query + s * query_stride + head * group * cache->dim, group, *cache, head,
                        tables + s * table_stride, first, lens[s], scale, seen.data());
            for (long g = 0; g < group; g++)
                join(&seen[g], 1, 1, cache->dim, out + (s * heads + head * group + g) * cache->dim);
        }
}

// One chunk of one sequence, whose keys and values are in the cache already: query and out
// [tokens, heads, dim], query with rows `query_stride` apart, at positions from `prefix` on.
void pdserve_chunk_attention(const LayerCache* cache, const uint16_t* query, long query_stride,
                             const int64_t* table, uint16_t* out, long tokens, long prefix,
                             long heads, long window, float scale, int threads) {
    static thread_local std::vector<uint16_t> packed;
    Queries queries{query,  query_stride, out,   heads * cache->dim, tokens,
                    prefix, heads,        window, scale};
    packed.resize(ChunkWork::packed_size(*cache, queries.first_key(), prefix + tokens));
    ChunkWork work(*cache, table, queries, packed.data());
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long i = 0; i < work.num_packs(); i++) work.pack(i);
#pragma omp for schedule(dynamic)
        for (long i = 0; i < work.num_pieces(); i++) work.attend(i);
    }
}

}  // extern "C"
