// What a step does with token ids, all on the device: ids to embeddings, logits to ids, drafts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/cuda/ops.h"

namespace oasis::cuda {

inline constexpr int kMaxDrafts = 16;

// The tokens of all requests; a request has a row from admission to its end. Every entry is a valid
// id at all times, known or not: a row that a step need not have computed still reads one.
struct TokenTables {
  int32_t* tokens;        // [request][stride]: prompt and generated tokens by position
  int64_t stride;         // a multiple of 4
  int32_t* lengths;       // [request]: tokens known
  int32_t* drafts;        // [request][kMaxDrafts]
  int32_t* draft_counts;  // [request]
};

// A row that needs logits, in a device array.
struct LogitsRow {
  int32_t row;       // of the step's rows; -1: padding, skipped
  int32_t request;   // its row of the tables
  int32_t position;  // of the row; the sampled token's is one more
};

// How a request samples, in a device array by its row of the tables; as in SamplingParams.
struct Sampling {
  float temperature;  // 0: greedy
  float top_p;        // 1: off
  float min_p;        // 0: off
  int32_t top_k;      // 0: off
  uint64_t seed;
};

// What the CTAs of a row leave to each other: zero, and left zero.
struct SampleWork {
  unsigned long long best;
  int32_t arrivals, spare;
};

struct Sample {
  const float* logits;  // [n][vocab]
  int vocab;
  const LogitsRow* rows;  // [n], of a request at most one
  TokenTables tables;
  SampleWork* work;  // [n]
  int32_t* result;   // [n], device or mapped host memory; padding is left alone
};

// x [row][row_bytes] = table[token of the row]; zeros for padding. row_bytes: a multiple of 16.
void embed(const Row* rows, int64_t num_rows, const TokenTables& tables, const void* table, void* x,
           int64_t row_bytes, cudaStream_t stream);
// y [n][row_bytes] = x[rows[i].row]; zeros for padding. row_bytes: a multiple of 16.
void take_rows(const LogitsRow* rows, int64_t n, const void* x, void* y, int64_t row_bytes,
               cudaStream_t stream);

// The largest logit's id, the lowest of several, into tables.tokens at position + 1, lengths
// (position + 2) and result. Where a logit is not finite, result is -1 and the tables are left.
void sample_greedy(const Sample& s, int64_t n, cudaStream_t stream);
// By each request's Sampling, as Sampler.draw does (engine/sampler.py); greedy at temperature 0.
void sample_random(const Sample& s, const Sampling* sampling, int64_t n, cudaStream_t stream);

// NgramDrafter's guess (draft/ngram.py) for each of requests[n] (-1: padding): `count` drafts, or
// draft_counts 0 where there is none.
void propose_ngram(const int32_t* requests, int64_t n, const TokenTables& tables, int count,
                   cudaStream_t stream);

}  // namespace oasis::cuda
