// Drives the core through its whole life without Python: random requests, drafts, cancels,
// preemption, shared prefixes and delayed transfers. Built with ThreadSanitizer and
// AddressSanitizer by tests/test_sanitizers.py. Prints "ok" and a digest of all outputs.
//
// The digest must not depend on the delay: the same arrivals with a delayed transfer worker give
// the same bits.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core.h"

using namespace oasis;

namespace {

constexpr int kLayers = 3, kHeads = 2, kGroup = 3, kDim = 64;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "core_stress: %s\n", what.c_str());
  std::exit(1);
}

CoreConfig config(int delay_us) {
  CoreConfig c;
  c.num_layers = kLayers;
  c.num_q_heads = kHeads * kGroup;
  c.num_kv_heads = kHeads;
  c.head_dim = kDim;
  c.top_k_blocks = 4;
  c.fetch_cap_blocks = 2;
  c.sparse_from_tokens = 80;
  c.max_draft_len = 3;
  c.accept_drafts = true;
  c.device_pages = 12;  // small: two or three requests at a time, so preemption happens
  c.host_blocks = 120;  // small: what is cached is evicted
  c.max_batch_size = 6;
  c.max_num_tokens = 64;
  c.max_seq_len = 256;
  c.transfer_delay_us = delay_us;
  c.fault_seed = 7;
  return c;
}

uint64_t mix(uint64_t h, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (h ^ bits) * 0x100000001b3ull;
}

// Requests of one family begin with the same rows; how many, depends on the request.
int64_t source(RequestId id, int64_t position) {
  const bool shared = position < id * 37 % 200 / kBlockTokens * kBlockTokens;
  return shared ? -1 - id % 3 : id;
}

// The same (request, position, layer) always gets the same row, so that outputs do not depend on
// what else is in the batch.
void fill_row(RequestId id, int64_t position, int layer, float* row, int64_t floats) {
  std::mt19937 rng(static_cast<uint32_t>(source(id, position) * 7919 + position * 31 + layer));
  for (int64_t i = 0; i < floats; ++i)
    row[i] = static_cast<float>(static_cast<int>(rng() % 2001) - 1000) / 500.0f;
}

std::vector<BlockName> names(RequestId id, int64_t tokens) {
  std::vector<BlockName> all(tokens / kBlockTokens);
  uint64_t chain[2] = {0xcbf29ce484222325ull, 0};
  for (size_t b = 0; b < all.size(); ++b) {
    chain[0] = (chain[0] ^ static_cast<uint64_t>(source(id, b * kBlockTokens))) * 0x100000001b3ull;
    chain[1] = b;
    std::memcpy(all[b].data(), chain, sizeof chain);
  }
  return all;
}

struct Digest {
  uint64_t value = 0xcbf29ce484222325ull;
  int64_t sparse = 0, preempted = 0, ended = 0, reused = 0, evicted = 0;
};

Digest run(int delay_us, int requests, uint64_t seed) {
  const CoreConfig c = config(delay_us);
  std::vector<float> cos(c.max_seq_len * kDim / 2, 1.0f), sin(c.max_seq_len * kDim / 2, 0.0f);
  Core core(c, cos.data(), sin.data());
  const Usage fresh = core.usage();
  std::mt19937_64 rng(seed);
  std::map<RequestId, int64_t> left;   // tokens still to generate
  std::map<RequestId, int64_t> whole;  // tokens at its end
  RequestId next = 1;
  Digest d;
  const int64_t in_floats = int64_t{kHeads} * (kGroup + 2) * kDim,
                out_floats = int64_t{kHeads} * kGroup * kDim;
  while (next <= requests || !left.empty()) {
    while (next <= requests && left.size() < 8 && rng() % 3 != 0) {
      const int64_t prompt = 1 + rng() % 90, generate = 1 + rng() % 150;
      core.submit(next, prompt, generate, names(next, prompt));
      whole[next] = prompt + generate;
      left[next++] = generate;
    }
    std::map<RequestId, int> drafts;
    for (const auto& [id, rows] : core.begin_step())
      drafts[id] = static_cast<int>(rng() % (rows + 1));
    const auto plan = core.plan(drafts);
    if (!plan) {
      if (left.empty() && next > requests) break;
      continue;
    }
    std::vector<float> qkv(plan->rows * in_floats), out(plan->rows * out_floats);
    const int layers = rng() % 150 == 0 ? static_cast<int>(rng() % kLayers)
                                        : kLayers;  // sometimes the caller fails half-way
    for (int l = 0; l < layers; ++l) {
      for (const RowGroup& g : plan->groups)
        for (int r = 0; r < g.rows; ++r)
          fill_row(g.id, g.start + r, l, qkv.data() + (g.row0 + r) * in_floats, in_floats);
      std::fill(out.begin(), out.end(), std::nanf(""));
      core.forward(l, qkv.data(), out.data());
      for (float x : out) {
        if (x != x) fail("an output was not written");
        d.value = mix(d.value, x);
      }
    }
    std::vector<RequestId> over;
    if (layers < kLayers) {
      for (const RowGroup& g : plan->groups) over.push_back(g.id);
      core.abort_step();
    } else {
      std::map<RequestId, int> yielded;
      for (const RowGroup& g : plan->groups) {
        if (g.logits_rows == 0) continue;
        const int n = 1 + static_cast<int>(rng() % g.logits_rows);
        yielded[g.id] = n;
        if ((left[g.id] -= n) <= 0) over.push_back(g.id);
      }
      core.commit(yielded);
    }
    if (rng() % 60 == 0 && !left.empty()) {
      auto it = left.begin();
      std::advance(it, rng() % left.size());
      over.push_back(it->first);
    }
    for (RequestId id : over) {
      if (!left.count(id)) continue;
      const SequenceStats s = core.stats(id, 0).sequence;
      d.sparse += s.sparse_steps;
      d.preempted += s.preemptions;
      if (rng() % 20 == 0) core.forget(id);
      if (!core.end(id, names(id, whole[id]))) fail("a request was unknown at its end");
      left.erase(id);
      ++d.ended;
    }
  }
  core.drain();
  const Usage u = core.usage();
  if (u.device_pages_free != fresh.device_pages || u.host_blocks_free != fresh.host_blocks ||
      u.summary_pages_free != fresh.summary_pages)
    fail("pools are not back at their baseline");
  d.reused = u.prefix_blocks_reused;
  d.evicted = u.prefix_blocks_evicted;
  return d;
}

// A core that goes while its workers still have jobs of its requests.
void drop(uint64_t seed) {
  const CoreConfig c = config(3000);
  std::vector<float> cos(c.max_seq_len * kDim / 2, 1.0f), sin(c.max_seq_len * kDim / 2, 0.0f);
  Core core(c, cos.data(), sin.data());
  std::mt19937_64 rng(seed);
  for (RequestId id = 1; id <= 3; ++id) core.submit(id, 20 + rng() % 60, 40);
  const int steps = 10 + rng() % 10;
  for (int s = 0; s <= steps; ++s) {
    core.begin_step();
    const auto plan = core.plan({});
    std::vector<float> qkv(plan->rows * kHeads * (kGroup + 2) * kDim, 0.5f),
        out(plan->rows * kHeads * kGroup * kDim);
    const int layers = s < steps ? kLayers : static_cast<int>(rng() % (kLayers + 1));
    for (int l = 0; l < layers; ++l) core.forward(l, qkv.data(), out.data());
    if (s == steps) return;
    std::map<RequestId, int> yielded;
    for (const RowGroup& g : plan->groups)
      if (g.logits_rows > 0) yielded[g.id] = 1;
    core.commit(yielded);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int requests = argc > 1 ? std::atoi(argv[1]) : 60;
  const Digest a = run(0, requests, 1), b = run(2000, requests, 1);
  if (a.value != b.value) fail("a delayed transfer changed the outputs");
  if (a.sparse == 0 || a.preempted == 0)
    fail("no sparse step or no preemption: " + std::to_string(a.sparse) + ", " +
         std::to_string(a.preempted));
  if (a.reused == 0 || a.evicted == 0)
    fail("no block was reused or none evicted: " + std::to_string(a.reused) + ", " +
         std::to_string(a.evicted));
  for (uint64_t seed = 0; seed < 8; ++seed) drop(seed);
  std::printf("ok requests=%lld sparse_steps=%lld preemptions=%lld digest=%016llx\n",
              static_cast<long long>(a.ended), static_cast<long long>(a.sparse),
              static_cast<long long>(a.preempted), static_cast<unsigned long long>(a.value));
  return 0;
}
